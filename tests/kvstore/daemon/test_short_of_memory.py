"""A service that may not have the memory it is configured for: a smaller tier and a warning, no signal, no kill."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.serve import keeper_command
from kvstore.client.rpc import Rpc
from kvstore.units import GIB, MIB, format_size
from tests.support.cgroup import Cgroup, NoCgroup, limited
from tests.support.daemon import Service, small_config, wait_for
from tests.support.driver import attached
from tests.support.worker import BLOCK_TOKENS

LIMIT_BYTES = 448 * MIB


@pytest.fixture
def group() -> Iterator[Cgroup]:
    """A memory limit for the whole service."""
    try:
        with limited(LIMIT_BYTES) as group:
            yield group
    except NoCgroup as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dram_bytes", [416 * MIB, 2 * GIB], ids=["beside the processes", "at all"])
def test_a_tier_that_does_not_fit_is_smaller_and_says_so(
    tmp_path: Path, group: Cgroup, dram_bytes: int
) -> None:
    """The tier took what the host had free; the container's limit was less, and the kernel killed the service."""
    config = small_config(tmp_path, dram_bytes=dram_bytes, dram_extent_bytes=32 * MIB)
    log = tmp_path / "kv.log"
    with log.open("ab") as out:
        process = subprocess.Popen(group.command(keeper_command(config)), stdout=out, stderr=out)
    service = Service(config=config, process=process, log=log, rpc=Rpc(config.socket), pids={process.pid})
    try:
        service.await_ready()
        daemon = service.daemon_pid
        warning = wait_for("the warning", lambda: [w for w in service.stats().warnings if "DRAM" in w])[0]
        have = service.tier("dram").allocated_bytes
        assert 32 * MIB <= have < min(dram_bytes, LIMIT_BYTES)
        assert (
            f"DRAM tier has {format_size(have)} of {format_size(dram_bytes)}: not enough memory for 32MiB"
            in warning
        )
        with attached(service.socket, "fills", pages=256) as engine:
            for number in range(6):  # touches DRAM through every path; nothing of it may be missing
                tokens = [number, *range(200 * BLOCK_TOKENS)]
                engine.run(f"r{number}", tokens)
                assert engine.run(f"again{number}", tokens).cached_tokens == 200 * BLOCK_TOKENS
        time.sleep(1.0)
        assert service.daemon_pid == daemon, "it was killed and started again"
        assert group.killed() == 0
        assert group.used_bytes() <= LIMIT_BYTES
        assert service.faults() == []
    finally:
        assert service.stop() == 0


def test_tables_larger_than_the_limit_are_one_line(tmp_path: Path, group: Cgroup) -> None:
    config = small_config(tmp_path, max_rows=10_000_000)
    done = subprocess.run(
        group.command(keeper_command(config)), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode not in (0, -9)
    assert group.killed() == 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvstore: "), done.stderr
    assert "not enough memory for " in last
