"""Keeper and daemon gone for good: what fits the slots in hand goes on, what does not ends with a line to act on."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from engine_adapter.base import RequestId
from engine_adapter.blocks.absence import Absence
from engine_adapter.engine.engine import Output
from engine_adapter.engine.request import FinishReason
from engine_adapter.serving.jsonl import decode_event
from engine_adapter.serving.requests import Answer
from engine_adapter.serving.worker import WorkerLimits, _Live, _Server
from kvstore.errors import Unavailable
from tests.support.daemon import small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
AWAY_S = 2.0


def test_losing_and_regaining_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([10.0, 12.0, 13.0, 20.0])
    absence = Absence(lambda: next(now))
    with caplog.at_level(logging.WARNING, "kvstore.worker"):
        absence.note(True)
        assert (absence.seconds(), caplog.messages) == (0.0, [])
        absence.note(False)
        absence.note(False)
        assert absence.seconds() == 2.0
        absence.note(True)
        absence.note(True)
        assert absence.seconds() == 0.0
    assert caplog.messages == [
        "the daemon is away: going on without a cache, in the slots in hand",
        "the daemon is back after 3 s",
    ]


def refused(engine: Driver, tokens: list[int], name: str) -> float:
    """Seconds until the block manager says that a request has no use in waiting."""
    request, began = engine.enqueue(name, tokens), time.monotonic()
    with pytest.raises(Unavailable, match="the daemon is away: start `kvstore serve`"):
        engine.admit(request, 10 * AWAY_S)
    engine.release(request)
    return time.monotonic() - began


def test_a_request_beyond_the_slots_in_hand_ends_when_the_daemon_stays_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was tried again for ever: the worker said nothing, and its client gave up after minutes without a reason."""
    config = small_config(tmp_path)
    large = [1, *range(60 * B)]
    with (
        caplog.at_level(logging.WARNING, "kvstore.worker"),
        started(config) as first,
        attached(first.socket, "alone", away_s=AWAY_S) as engine,
    ):
        wait_for("credit", lambda: engine.session.credit_in_hand >= 4)
        assert engine.session.credit_in_hand < 60
        daemon, keeper = first.daemon_pid, first.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        os.kill(daemon, signal.SIGKILL)
        assert refused(engine, large, "large") > AWAY_S
        assert refused(engine, large, "later") < AWAY_S, "it is known by then"
        small = engine.enqueue("small", [2, *range(B)])
        assert engine.admit(small).cached_tokens == 0
        engine.release(small)
        with started(config):
            wait_for("the next daemon", lambda: engine.blocks.wait(0.01) or engine.session.available)
            assert engine.run("large again", large).cached_tokens == 0
    said = [record.getMessage() for record in caplog.records if record.name == "kvstore.worker"]
    assert [text.split(" after")[0] for text in said] == [
        "the daemon is away: going on without a cache, in the slots in hand",
        "the daemon is back",
    ]


class Client:
    """A connection's place: keeps the lines that are sent."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def send(self, line: bytes) -> None:
        self.lines.append(line)


def test_a_worker_tells_its_client_why_and_forgets_the_request() -> None:
    server, client, name = _Server(None, WorkerLimits()), Client(), RequestId("1/a")  # type: ignore[arg-type]
    answer = Answer(accepted_at=0.0, prompt_tokens=9)
    server._live[name] = _Live(connection=client, name="a", stream=True, answer=answer)  # type: ignore[arg-type]
    error = Unavailable("the daemon is away: start `kvstore serve`")
    failed = Output(request_id=name, token_ids=(), text="", finish=FinishReason.FAILED, error=error)
    server._outputs([failed, failed])
    (line,) = client.lines
    assert not server._live
    with pytest.raises(Unavailable, match="start `kvstore serve`"):
        decode_event(line)
