"""`kvstore bench store` at tiny sizes: shape of what it gives, and that it notices wrong bytes."""

from __future__ import annotations

import mmap
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.storage import MoverSide, PlainFile
from bench.store import StorePlan, measure
from kvstore.errors import KvstoreError
from kvstore.moves import MoveKind

BLOCK = 64 << 10
TINY = StorePlan(block_bytes=(BLOCK, 2 * BLOCK), memory_bytes=1 << 20, disk_bytes=1 << 20, rounds=2)


def test_every_leg_and_size_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    legs = [asdict(leg) for leg in measure(TINY, said.append, tmp_path)]
    names = ("hbm_to_dram", "dram_to_hbm", "dram_to_nvme", "nvme_to_dram")
    assert [leg["leg"] for leg in legs] == [f"{name}_{size}" for size in TINY.block_bytes for name in names]
    for leg in legs:
        assert set(leg) == {"leg", "gb_per_s", "raw_gb_per_s", "ratio"}
        assert all(leg[key] > 0 for key in ("gb_per_s", "raw_gb_per_s", "ratio"))
    assert len(said) == 4
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


def test_blocks_go_through_the_real_mover_and_come_back(tmp_path: Path) -> None:
    with MoverSide(tmp_path, 5, BLOCK) as mover:
        mover.transfer(MoveKind.WRITE)
        mover.scribble()
        with pytest.raises(KvstoreError, match="5 blocks are not what was written"):
            mover.check()
        mover.transfer(MoveKind.READ)
        mover.check()


def test_a_corrupt_block_is_no_result(tmp_path: Path) -> None:
    """A benchmark that does not look at what it moved measures nothing."""
    with MoverSide(tmp_path, 5, BLOCK) as mover:
        mover.transfer(MoveKind.WRITE)
        (slab,) = (tmp_path / "slabs").glob("*.kv")
        with slab.open("r+b") as file:
            file.seek(100)
            file.write(b"x")
        with pytest.raises(KvstoreError, match="1 moves failed"):
            mover.transfer(MoveKind.READ)


def test_the_plain_file_reads_what_it_wrote(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 3 * BLOCK)
    memory[:] = bytes(range(256)) * (3 * BLOCK // 256)
    with PlainFile(tmp_path, memoryview(memory), BLOCK) as plain:
        plain.write()
        memory[:] = bytes(3 * BLOCK)
        plain.read()
        assert memory[:] == bytes(range(256)) * (3 * BLOCK // 256)
