"""Keeper and daemon die while a request that runs already is still being loaded."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.engine_adapter.blocks.test_early_admission import (
    CACHED,
    GROUPS,
    B,
    admitted_early,
    loading,
    prompt,
)
from tests.kill.harness import HANG_S
from tests.support.daemon import small_config, started, wait_for

pytestmark = pytest.mark.kill


def test_a_session_that_is_lost_between_two_groups_has_its_request_computed_again(tmp_path: Path) -> None:
    """Keeper and daemon gone: nothing of the load is ever sealed, and the request that has it is preempted."""
    config = small_config(tmp_path)
    tokens = prompt()
    with started(config) as first, loading(first, tokens) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        copier.step(2)
        assert admission.arriving.wait_for(1)
        daemon, keeper = first.daemon_pid, first.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        os.kill(daemon, signal.SIGKILL)
        with started(config) as second:
            wait_for("the loss", lambda: not engine.session.connected and engine.blocks.end_step() is None)
            copier.step(2)
            assert admission.arriving.wait_for(GROUPS - 1)
            engine.check(request, CACHED)  # its own pages, which nobody was given
            engine.fill(request, CACHED * B)
            deadline = time.monotonic() + HANG_S
            while engine.blocks.reserve(request, CACHED * B + 2):
                assert time.monotonic() < deadline
                engine.blocks.end_step()
                engine.blocks.wait(0.02)
            engine.release(request)
            assert engine.run("cold", tokens, timeout_s=HANG_S).cached_tokens == 0
            assert second.faults() == []
