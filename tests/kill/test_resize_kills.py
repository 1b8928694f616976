"""Kills daemon and mover while a path becomes smaller and larger under load: the size that was asked for comes to hold.

$KVSTORE_TEST_RESIZE_KILLS sets how many kills (default 12), $KVSTORE_TEST_SEED which moments and sizes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.config import NvmePath
from kvstore.errors import KvstoreError
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kill.harness import HANG_S, Load, WorkerSpec, progress, told_where, within_capacity
from tests.support.daemon import Service, small_config, started, wait_for

KILLS = int(os.environ.get("KVSTORE_TEST_RESIZE_KILLS", "12"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
SIZES_MIB = (64, 72, 88, 104)

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1800)]


def ask(service: Service, mib: int) -> pb.ResizeReply:
    request = pb.ResizeRequest(tier="nvme", path=service.config.nvme[0].path, capacity_bytes=mib * MIB)
    reply = service.call("Resize", request, service="admin", timeout_s=HANG_S)
    assert isinstance(reply, pb.ResizeReply)
    return reply


def test_a_size_comes_to_hold_whatever_dies(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    config = small_config(
        tmp_path,
        nvme_bytes=104 * MIB,
        nvme_extent_bytes=8 * MIB,
        dram_bytes=16 * MIB,
        dram_extent_bytes=4 * MIB,
    )
    with started(config) as service:
        load = Load(service.socket, WorkerSpec(), SEED)
        try:
            load.await_progress(20)
            for kill in range(KILLS):
                with told_where(f"kill {kill} of {KILLS}, seed {SEED}"):
                    _resize_and_kill(service, rng, load)
            progress(f"{KILLS} kills, {load.requests} requests, {load.hit_blocks} blocks hit")
            load.stop()
        finally:
            load.end()
        assert service.faults() == []


def _resize_and_kill(service: Service, rng: random.Random, load: Load) -> None:
    size = rng.choice(SIZES_MIB)
    daemon, movers = service.daemon_pid, service.mover_pids()
    with contextlib.suppress(KvstoreError):
        request = pb.ResizeRequest(tier="nvme", path=service.config.nvme[0].path, capacity_bytes=size * MIB)
        service.call("Resize", request, service="admin", timeout_s=rng.random() * 0.2)
    time.sleep(rng.random() * 0.1)
    victims = rng.choice([[daemon], movers, [daemon, *movers]])
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if daemon in victims:
        wait_for("another daemon", lambda: service.daemon_pid != daemon and service.stats().ready, HANG_S)
    wait_for("the size", lambda: ask(service, size).complete, HANG_S)
    path = NvmePath(path=service.config.nvme[0].path, capacity_bytes=size * MIB)
    within_capacity(replace(service.config, nvme=(path,)))
    load.await_progress()
    within_capacity(replace(service.config, nvme=(path,)))
    assert service.faults() == []
