"""`kvstore bench nvme` at tiny sizes: shape of what it gives, what the plain loop is given, and wrong bytes noticed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bench.nvme import PATTERNS, NvmePlan, figures, measure, slots_of
from bench.storage import MoverSide, PlainPool, Shape
from kvstore.errors import KvstoreError
from kvstore.moves import MoveKind

BLOCK = 64 << 10
TINY = NvmePlan(block_bytes=(BLOCK, 2 * BLOCK), nbytes=1 << 20, rounds=2, threads=(1, 2), probes=1)


def test_every_leg_is_measured_beside_the_plain_loop(tmp_path: Path) -> None:
    said: list[str] = []
    found = measure(TINY, said.append, tmp_path)
    legs = [(leg.block_bytes, leg.pattern, leg.way) for leg in found.legs]
    assert legs == [
        (size, pattern, way) for size in TINY.block_bytes for pattern in PATTERNS for way in ("write", "read")
    ]
    for leg in found.legs:
        assert leg.plain_threads in TINY.threads
        assert leg.gb_per_s > 0
        assert leg.plain_gb_per_s > 0
        assert leg.checksum_cpu_s_per_gb > 0
        assert leg.cpu_s_per_gb > 0, "a checksum takes time"
        assert leg.unread_ratio > 0
    assert found.mover_threads > 0
    assert len(said) == len(legs)
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"
    bounds = {figure.bound for figure in figures(asdict(found))}
    assert bounds == {None, 0.92, 0.04}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_lie_as_the_pattern_says(pattern: str) -> None:
    dram, nvme = slots_of(pattern, 64)
    assert sorted(dram.tolist()) == list(range(64))
    assert len(np.unique(nvme)) == 64
    assert int(nvme.max()) < 128
    neighbours = np.isin(nvme + np.uint64(1), nvme).sum()
    assert neighbours == (63 if pattern == "runs" else 0)


def test_the_plain_pool_moves_what_the_mover_finds_again(tmp_path: Path) -> None:
    dram, nvme = slots_of("runs", 6)
    with MoverSide(tmp_path, 6, BLOCK, slots=12) as mover:
        mover.place(dram, nvme)
        mover.transfer(MoveKind.WRITE)
        with PlainPool(mover, BLOCK, dram, nvme, most_threads=2) as pool:
            assert [len(buffers) for _, buffers in pool.calls(4)] == [7, 3], "payloads with trailers between"
            for shape in (Shape(threads=2, blocks_a_call=1), Shape(threads=2, blocks_a_call=4)):
                pool.transfer(MoveKind.WRITE, shape)
                mover.scribble()
                pool.transfer(MoveKind.READ, shape)
                mover.check()
                mover.scribble()
                mover.transfer(MoveKind.READ)
                mover.check()


def test_what_is_moved_unread_is_whole_by_the_checksums_that_were_learned(tmp_path: Path) -> None:
    with MoverSide(tmp_path, 4, BLOCK) as mover:
        mover.learn()
        mover.transfer_unread(MoveKind.WRITE)
        for transfer in (mover.transfer, mover.transfer_unread):
            mover.scribble()
            transfer(MoveKind.READ)
            mover.check()


def test_the_movers_processor_time_is_seen(tmp_path: Path) -> None:
    with MoverSide(tmp_path, 4, BLOCK) as mover:
        before = mover.cpu_s()
        mover.transfer(MoveKind.WRITE)
        assert mover.cpu_s() > before > 0


def test_a_plain_call_past_the_end_of_the_file_is_no_result(tmp_path: Path) -> None:
    dram, nvme = slots_of("runs", 4)
    with MoverSide(tmp_path, 4, BLOCK) as mover:
        mover.transfer(MoveKind.WRITE)
        with PlainPool(mover, BLOCK, dram, nvme, most_threads=1) as pool:
            with mover.path.open("r+b") as file:
                file.truncate(BLOCK)
            with pytest.raises(KvstoreError, match="moved"):
                pool.transfer(MoveKind.READ, Shape(threads=1, blocks_a_call=1))
