"""Memory stays within the configured tiers, the tables, and the constant that docs/configuration.md states."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from kvstore.daemon.recovery import table_shape
from kvstore.layout import table_bytes
from kvstore.units import MIB
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.footprint import Footprint, footprint

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
HBM_BYTES = 16 * MIB


def stated_bytes(paths: int) -> int:
    """The constant as the document states it."""
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    found = re.search(r"at most (\d+) MiB for keeper and daemon, and (\d+) MiB for the mover of each", text)
    assert found is not None, "the document states no constant"
    return (int(found[1]) + paths * int(found[2])) * MIB


def measured(service: Service) -> Footprint:
    """Of keeper, daemon and movers."""
    return footprint([service.keeper_pid, service.daemon_pid, *service.mover_pids()])


def test_memory_stays_within_the_tiers_and_a_constant(tmp_path: Path) -> None:
    """Caches grew with the number of blocks and requests that passed through until the machine ran out of memory."""
    config = small_config(tmp_path, nvme_bytes=128 * MIB)
    small_bytes = 2 * MIB  # names of namespaces 1 MiB, the recording 0.7, numbers of slabs, a page of sizes
    shared_bytes = config.dram_bytes + HBM_BYTES + table_bytes(table_shape(config)) + small_bytes
    with started(config) as service:
        wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == config.dram_bytes)
        command = [sys.executable, "-m", "tests.support.worker", "--socket", config.socket]
        command += ["--hbm-bytes", str(HBM_BYTES), "--conversations", "200"]
        workers = [
            subprocess.Popen(
                [*command, "--name", f"load{seed}", "--seed", str(seed)], stdout=subprocess.DEVNULL
            )
            for seed in (1, 2)
        ]
        try:
            early = wait_for("load", lambda: _counted(service, 2_000) and measured(service))
            seen = [early]
            until = time.monotonic() + 8.0
            while time.monotonic() < until:
                time.sleep(0.5)
                seen.append(measured(service))
                assert all(worker.poll() is None for worker in workers)
            stats = service.stats()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(30)
        own = max(each.own for each in seen)
        shared = max(each.shared for each in seen)
        print(
            f"after {stats.counters['seals_published']} blocks: {own / MIB:.0f} MiB of its own "
            f"(at first {early.own / MIB:.0f}), {shared / MIB:.0f} MiB shared of at most {shared_bytes / MIB:.0f}"
        )
        assert shared <= shared_bytes
        assert own <= stated_bytes(paths=1)
        assert own - early.own <= 24 * MIB, "it grows with what passes through"


def _counted(service: Service, blocks: int) -> bool:
    return service.stats().counters["seals_published"] >= blocks
