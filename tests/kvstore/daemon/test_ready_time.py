"""Ready soon, whatever the size of the tiers: tables and a first extent, the rest comes behind."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from kvstore.daemon.recovery import table_shape
from kvstore.layout import table_bytes
from kvstore.units import GIB, MIB
from tests.support.daemon import small_config, start
from tiers.memfd import available_memory_bytes

ROWS = 10_000_000
BOUND_S = 2.0
_NUMBERS = itertools.count()


def ready_s(folder: Path, **changes: object) -> float:
    """Seconds from the start of the keeper's process to the first answer that says ready."""
    place = folder / str(next(_NUMBERS))
    place.mkdir(mode=0o700)
    config = small_config(place, dram_extent_bytes=64 * MIB, min_slot_bytes=64 * 1024, **changes)
    began = time.monotonic()
    service = start(config, place / "log")
    try:
        service.await_ready()
        took_s = time.monotonic() - began
        daemon = service.daemon_pid
        os.kill(service.process.pid, signal.SIGKILL)  # at once: it is about to take all that memory
        os.kill(daemon, signal.SIGKILL)
        service.process.wait(30)
    finally:
        service.stop()
    return took_s


def need_memory(nbytes: int) -> None:
    """Skips where the machine has less: a tier that can never fit is refused."""
    available = available_memory_bytes()
    if available < nbytes:
        pytest.skip(f"needs {nbytes / GIB:.0f} GiB of free memory, there are {available / GIB:.0f}")


def test_a_large_tier_is_ready_as_soon_as_a_small_one(tmp_path: Path) -> None:
    """Elsewhere a server that was given much memory touched all of it before it answered: 20 to 40 seconds."""
    need_memory(17 * GIB)
    # The least of three, and in turns: what else the machine has to do is then the same for both.
    starts = [
        (ready_s(tmp_path, dram_bytes=64 * MIB), ready_s(tmp_path, dram_bytes=16 * GIB)) for _ in range(3)
    ]
    small, large = map(min, zip(*starts, strict=True))
    print(f"ready after {small:.2f} s with 64 MiB of DRAM, {large:.2f} s with 16 GiB")
    assert large <= 1.5 * small + 0.3
    assert large <= 3 * BOUND_S, "the bound is 2 s on an idle machine; three times that on a busy one"


def test_many_rows_cost_their_tables_and_no_more(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_rows=ROWS, dram_bytes=16 * GIB)
    needed = table_bytes(table_shape(config))
    need_memory(17 * GIB + needed)
    seconds = min(ready_s(tmp_path, max_rows=ROWS, dram_bytes=16 * GIB) for _ in range(3))
    print(
        f"ready after {seconds:.2f} s with 16 GiB of DRAM and {ROWS:,} rows ({needed / MIB:.0f} MiB of tables)"
    )
    assert seconds <= 3 * BOUND_S
