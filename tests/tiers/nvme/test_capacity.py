"""What a path takes on its disk: never more than its capacity, by length and by what the file system gives."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, ResourceExhausted
from kvstore.units import GIB, MIB
from tests.tiers.harness import SLOT_BYTES
from tiers.dram import DramTier
from tiers.nvme.capacity import (
    SMALL_FILES_BYTES,
    check_room,
    default_map_bytes,
    disk_usage,
    index_bytes,
    plan,
    require_room,
    slab_file_bytes,
    slab_room,
)
from tiers.nvme.io import NvmeTier
from tiers.nvme.slab import open_slab

TIB = 1 << 40


@given(st.integers(64 * MIB, 64 * TIB), st.integers(256, 1 << 18).map(lambda pages: pages * 4096))
def test_a_plan_stays_within_the_capacity(capacity: int, extent: int) -> None:
    """The disk tier grew past what was configured and filled the disk."""
    made = plan(capacity, extent, default_map_bytes(capacity))
    assert made.slabs >= 1
    assert made.slab_bytes % 4096 == 0
    assert made.total_bytes <= capacity
    one_more = slab_file_bytes(made.slab_bytes)
    assert made.total_bytes + one_more > capacity or made.slab_bytes < extent, "room is left for one more"
    assert made.slabs_bytes <= slab_room(capacity, made.map_bytes)


@pytest.mark.parametrize("capacity", [64 * MIB, 100 * MIB, GIB, 100 * GIB + 12345])
@pytest.mark.parametrize("extent", [MIB, 64 * MIB, 256 * MIB])
def test_a_plan_uses_what_it_may(capacity: int, extent: int) -> None:
    made = plan(capacity, extent, default_map_bytes(capacity))
    assert capacity - made.total_bytes < slab_file_bytes(made.slab_bytes)


def test_a_capacity_too_small_is_said() -> None:
    with pytest.raises(ConfigError, match="8MiB is too little"):
        plan(8 * MIB, 64 * MIB, default_map_bytes(8 * MIB))


def test_a_disk_without_room_is_said(tmp_path: Path) -> None:
    check_room(tmp_path, plan(64 * MIB, 16 * MIB, 8 * MIB))
    with pytest.raises(ConfigError, match="is configured"):
        check_room(tmp_path, plan(1 << 50, 256 * MIB, 8 * MIB))


def test_what_exists_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart on a disk that its own slabs had filled was refused for lack of space."""

    class Full:
        f_bavail = 0
        f_frsize = 4096

    monkeypatch.setattr("tiers.nvme.capacity.os.statvfs", lambda path: Full)
    wanted = plan(32 * MIB, 16 * MIB, 8 * MIB)
    Full.f_bavail = (wanted.total_bytes - 16 * MIB) // 4096
    with pytest.raises(ConfigError):
        check_room(tmp_path, wanted)
    open_slab(tmp_path, 1, 16 * MIB, SLOT_BYTES).close()
    check_room(tmp_path, wanted)


def test_a_slab_takes_no_more_than_it_is_counted_for(tmp_path: Path) -> None:
    """Of a slab written slot by slot in any order the file system keeps a list, which takes room beside its bytes."""
    nbytes = 8 * MIB
    slab = open_slab(tmp_path, 1, nbytes, 4096)
    pages = memoryview(mmap.mmap(-1, 8192))  # aligned, as O_DIRECT wants it
    places = list(range(slab.file.slots))
    random.Random(7).shuffle(places)
    for place in places[: len(places) // 2]:
        slab.write([pages], place * 8192)
    slab.sync()
    slab.close()
    taken = os.stat(tmp_path / slab.file.name).st_blocks * 512
    assert nbytes <= taken <= slab_file_bytes(nbytes)


def test_everything_in_the_directory_counts(tmp_path: Path) -> None:
    open_slab(tmp_path, 1, MIB, SLOT_BYTES).close()
    (tmp_path / "slab-2-4096.kv.new").write_bytes(bytes(5000))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(bytes(10_000))
    sparse = tmp_path / "secret"
    with sparse.open("wb") as file:
        file.truncate(3 * MIB)
    usage = disk_usage(tmp_path)
    assert usage.slab_bytes >= MIB + 8192
    assert usage.index_bytes >= 12_288
    assert usage.other_bytes >= 3 * MIB, "a file with holes counts by its length"
    assert usage.total_bytes == usage.slab_bytes + usage.index_bytes + usage.other_bytes


def test_files_of_others_are_named(tmp_path: Path) -> None:
    for name in ("lock", "secret", "cleared.new", "slab-1-4096.kv", "note.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "lock").write_bytes(bytes(MIB))
    usage = disk_usage(tmp_path)
    assert [name for name, _ in usage.foreign] == ["films", "note.txt"]
    assert MIB < usage.foreign[0][1] < 2 * MIB


def test_a_slab_beyond_the_room_is_refused(tmp_path: Path) -> None:
    """A slab that could not be deleted stayed, and the next one went beyond the capacity."""
    limit = slab_room(2 * slab_file_bytes(MIB) + index_bytes(8 * MIB) + SMALL_FILES_BYTES, 8 * MIB)
    for number in (1, 2):
        require_room(tmp_path, limit, MIB)
        open_slab(tmp_path, number, MIB, SLOT_BYTES).close()
    with pytest.raises(ResourceExhausted, match="could not be deleted"):
        require_room(tmp_path, limit, MIB)


def test_a_tier_makes_no_slab_beyond_its_room(tmp_path: Path) -> None:
    """The bound was the daemon's sum alone: a slab that could not be deleted was not in it."""
    tier = NvmeTier(tmp_path, DramTier())
    tier.slabs_bytes = 2 * slab_file_bytes(MIB)
    tier.open_slab(1, 1, MIB, SLOT_BYTES)
    tier.open_slab(2, 2, MIB, SLOT_BYTES)
    with pytest.raises(ResourceExhausted, match="no room for a slab"):
        tier.open_slab(3, 3, MIB, SLOT_BYTES)
    tier.open_slab(2, 2, MIB, SLOT_BYTES)  # it is there already
    tier.slabs_bytes += slab_file_bytes(MIB)
    tier.open_slab(3, 3, MIB, SLOT_BYTES)
    tier.close()
