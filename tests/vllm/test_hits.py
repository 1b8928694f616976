"""A prompt is the same, bit for bit, from vLLM's own cache and from every tier of the store, whatever has died.

What was broken: the first prompt after the daemon's kill -9 was computed at times, as a load was given up before the
daemon was back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from kvstore.client import connect
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, kill_everything, started
from tests.vllm.processes import Answer, Vllm, connector, service_config

BLOCK = 32
Prompt = Callable[[int, int], list[int]]


def flushed(service: Service) -> None:
    """All that is stored is on disk."""
    with connect(service.socket) as client:
        reply = client.flush(60.0)
    assert isinstance(reply, pb.FlushReply)
    assert not reply.pending_blocks


def hits(answers: list[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def said(answers: list[Answer]) -> list[object]:
    return [answer.said for answer in answers]


def test_every_tier_gives_what_vllms_own_cache_gives(place: Path, prompt: Prompt) -> None:
    """Prompts of ten blocks and some tokens, of exactly four blocks, of one token over, and of less than a block."""
    prompts = [prompt(1, 10 * BLOCK + 5), prompt(2, 4 * BLOCK), prompt(3, 4 * BLOCK + 1), prompt(4, 20)]
    found = [10 * BLOCK, 3 * BLOCK, 4 * BLOCK, 0]
    config = service_config(place)
    options = {"connector": connector(config)}
    with started(config) as service:
        with Vllm(place / "one.log", **options) as vllm:
            assert vllm.call("attached")
            # One by one, so that each is computed in the shape in which it is asked again.
            cold = [vllm.generate(one)[0] for one in prompts]
            local = [vllm.generate(one)[0] for one in prompts]
            assert hits(cold) == [0, 0, 0, 0]
            assert hits(local) == found
            assert [answer.tokens for answer in cold] == [answer.tokens for answer in local]
            assert cold[3].said == local[3].said  # the one whose shapes agree
            vllm.reset()
            stored = [vllm.generate(one)[0] for one in prompts]
            assert (hits(stored), said(stored)) == (found, said(local))
            assert vllm.call("stats")["loaded_blocks"] == 17
            service.kill_daemon()
            vllm.reset()
            again = [vllm.generate(one)[0] for one in prompts]
            assert (hits(again), said(again)) == (found, said(local))
            os.kill(service.daemon_pid, signal.SIGKILL)  # and asked again at once, while nobody is there
            vllm.reset()
            away = [vllm.generate(one)[0] for one in prompts]
            assert (hits(away), said(away)) == (found, said(local))
        with Vllm(place / "two.log", **options) as vllm:
            assert vllm.call("attached")
            other = [vllm.generate(one)[0] for one in prompts]
            assert (hits(other), said(other)) == (found, said(local))
            flushed(service)
            vllm.kill()
        assert service.faults() == []
        kill_everything(service)
    with started(config) as service, Vllm(place / "three.log", **options) as vllm:
        assert vllm.call("attached")
        disk = [vllm.generate(one)[0] for one in prompts]
        assert (hits(disk), said(disk)) == (found, said(local))
        assert service.stats().counters["blocks_hit_dram"] > 0
        assert service.faults() == []
