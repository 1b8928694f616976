"""What is wrong with a path, and what becomes of it when it is mended: nothing is changed before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import Durability
from kvstore.errors import AlreadyExists, ConfigError
from kvstore.moves import MoveStatus
from tests.tiers.harness import NVME, SLABS, SLOT_BYTES, STRIDE, Harness
from tiers.nvme.directory import NvmeDirectory, keep_secret, lock_existing
from tiers.nvme.fsck import Finding, Trouble, judge_records
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex, load_index
from tiers.nvme.io import NvmeTier
from tiers.nvme.notes import SizeNote, write_size
from tiers.nvme.recover import recover
from tiers.nvme.scan import scan_slabs
from tiers.nvme.slab import SlabFile, list_slabs
from tiers.nvme.verify import Examination, examine, mend

BLOCKS = 32
SLAB = SlabFile(number=1, slot_bytes=SLOT_BYTES, nbytes=SLABS)
MAP_BYTES = 8 << 20


def index_of(directory: Path) -> DurableIndex:
    return DurableIndex(directory, map_bytes=MAP_BYTES, durability=Durability.POWER)


@pytest.fixture
def place(harness: Harness, tmp_path: Path) -> Path:
    """A path with 32 blocks, left in order."""
    folder = tmp_path / "path"
    directory = NvmeDirectory.open(folder)
    keep_secret(folder, bytes(range(32)))
    tier = NvmeTier(folder, harness.memory)
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    slots = list(range(BLOCKS))
    for slot in slots:
        harness.fill(slot)
    assert (tier.transfer(harness.moves_for(slots))["status"] == MoveStatus.OK).all()
    tier.sync()
    tier.close()
    index = index_of(folder)
    index.commit(scan_slabs(folder, list_slabs(folder)), np.empty(0, dtype=SLOT_REF))
    index.close()
    directory.close()
    return folder


def look(place: Path, capacity_bytes: int | None = None) -> Examination:
    return examine(place, capacity_bytes=capacity_bytes, threads=4)


def troubles(findings: tuple[Finding, ...]) -> dict[Trouble, int]:
    return {finding.trouble: finding.count for finding in findings}


def overwrite(place: Path, offset: int, data: bytes) -> None:
    with (place / SLAB.name).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def move_slot(place: Path) -> None:
    """What lies in slot 5 also lies in slot 6."""
    with (place / SLAB.name).open("rb") as file:
        file.seek(5 * STRIDE)
        data = file.read(STRIDE)
    overwrite(place, 6 * STRIDE, data)


def enter(place: Path, change: Callable[[np.ndarray], None], slot: int) -> None:  # type: ignore[type-arg]
    """Another record in the index, made of that of slot 3."""
    index = index_of(place)
    record = load_index_of(place)[3:4].copy()
    record["slot"] = slot
    change(record)
    index.commit(record, np.empty(0, dtype=SLOT_REF))
    index.close()


def load_index_of(place: Path) -> np.ndarray:  # type: ignore[type-arg]
    return scan_slabs(place, list_slabs(place))


def snapshot(place: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(place.rglob("*"))
        if path.name not in ("lock", "lock.mdb")
    }


def test_a_path_that_was_left_in_order_is_clean(place: Path) -> None:
    before = snapshot(place)
    seen: list[tuple[int, int]] = []
    found = examine(
        place, capacity_bytes=1 << 30, threads=4, progress=lambda done, total: seen.append((done, total))
    )
    assert found.findings == ()
    assert (len(found.records), found.sound_blocks) == (BLOCKS, BLOCKS)
    assert found.verified_bytes == BLOCKS * SLOT_BYTES
    assert seen[0] == (0, BLOCKS)
    assert seen[-1] == (BLOCKS, BLOCKS)
    assert snapshot(place) == before


DAMAGE: dict[str, tuple[Callable[[Path], None], Trouble]] = {
    "a flipped bit": (lambda place: overwrite(place, 6 * STRIDE + 77, b"\xff\x00\xff"), Trouble.CHECKSUM),
    "a torn write": (lambda place: overwrite(place, 6 * STRIDE + 8192, bytes(8192)), Trouble.CHECKSUM),
    "no trailer": (lambda place: overwrite(place, 7 * STRIDE - 4096, bytes(4096)), Trouble.NO_TRAILER),
    "half a trailer": (lambda place: overwrite(place, 7 * STRIDE - 4096 + 50, bytes(8)), Trouble.NO_TRAILER),
    "a misplaced write": (move_slot, Trouble.OTHER_BLOCK),
}


@pytest.mark.parametrize("damage,trouble", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_bad_block_is_found_and_leaves_the_index(
    place: Path, damage: Callable[[Path], None], trouble: Trouble
) -> None:
    damage(place)
    before = snapshot(place)
    found = look(place)
    assert troubles(found.findings) == {trouble: 1}
    assert found.findings[0].places == ("slab 1 slot 6",)
    assert found.sound_blocks == BLOCKS - 1
    assert snapshot(place) == before, "looking changes nothing"
    assert [finding.mended for finding in mend(found)] == [True]
    assert look(place).findings == ()
    assert sorted(load_index(place)["slot"].tolist()) == [slot for slot in range(BLOCKS) if slot != 6]
    if trouble is not Trouble.OTHER_BLOCK:  # what lies there is a whole block, if another
        shutil.rmtree(place / "index")
        assert 6 not in scan_slabs(place, list_slabs(place))["slot"], "a scan does not bring it back either"


def test_a_slab_that_was_cut_short_loses_the_blocks_behind(place: Path) -> None:
    os.truncate(place / SLAB.name, 10 * STRIDE)
    found = look(place)
    assert troubles(found.findings) == {Trouble.NO_SLOT: BLOCKS - 10}
    mend(found)
    assert look(place).findings == ()
    assert len(load_index(place)) == 10


def test_a_slab_that_is_gone_takes_its_records_with_it(place: Path) -> None:
    (place / SLAB.name).unlink()
    found = look(place)
    assert troubles(found.findings) == {Trouble.NO_SLOT: BLOCKS}
    mend(found)
    assert len(load_index(place)) == 0


@pytest.mark.parametrize("how", ["gone", "garbage", "truncated"])
def test_a_damaged_index_is_rebuilt_from_what_is_whole(place: Path, how: str) -> None:
    """A damaged index may kill who reads it: a truncated one raises SIGBUS."""
    data = place / "index" / "data.mdb"
    if how == "gone":
        shutil.rmtree(place / "index")
    elif how == "garbage":
        data.write_bytes(os.urandom(data.stat().st_size))
    else:
        os.truncate(data, 8192)
    overwrite(place, 6 * STRIDE, b"damage")
    found = look(place)
    assert troubles(found.findings) == {Trouble.INDEX: 1, Trouble.CHECKSUM: 1}
    mend(found)
    assert look(place).findings == ()
    assert len(load_index(place)) == BLOCKS - 1


def test_a_truncated_index_is_said_in_words(place: Path) -> None:
    """An index that killed its reader was told as the reader's exit code, -7."""
    os.truncate(place / "index" / "data.mdb", 8192)
    (finding,) = look(place).findings
    assert finding.text == "is cut short or damaged"
    found = recover(place, map_bytes=MAP_BYTES, timeout_s=60)
    found.close()
    assert found.blocks.rebuilt == "the index is cut short or damaged"


def test_an_index_of_another_format_is_told_without_advice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of fsck said of an index that it had mended: nothing was changed, make it anew with fsck --repair."""
    shutil.rmtree(place / "index")
    with monkeypatch.context() as other:
        other.setattr("tiers.nvme.index._VERSION", b"1")
        DurableIndex(place, map_bytes=MAP_BYTES, durability=Durability.POWER).close()
    found = look(place)
    (finding,) = mend(found)
    assert (finding.text, finding.mended) == ("is of format 1, this kvstore reads 2", True)
    assert look(place).findings == ()
    assert len(load_index(place)) == BLOCKS


def test_a_block_that_is_there_twice_is_kept_once(place: Path) -> None:
    def again(record: np.ndarray) -> None:  # type: ignore[type-arg]
        record["touch"] += 1

    enter(place, again, slot=40)
    found = look(place)
    assert troubles(found.findings)[Trouble.DUPLICATE] == 1
    assert troubles(found.findings)[Trouble.NO_TRAILER] == 1, "of the two the one used last is not there"
    mend(found)
    assert look(place).findings == ()


def test_records_by_themselves() -> None:
    records = np.zeros(6, dtype=RECORD)
    records["slab"], records["slot"] = [1, 1, 2, 1, 1, 1], [0, 1, 0, 99_999, 2, 3]
    records["length"] = [SLOT_BYTES] * 4 + [4096, SLOT_BYTES]
    records["hash"][:, 0] = [7, 7, 8, 9, 10, 7]
    records["ns_digest"][5] = 1  # another namespace
    records["touch"] = [5, 6, 1, 1, 1, 1]
    none, no_slot = Trouble.NONE, Trouble.NO_SLOT
    expected = [Trouble.DUPLICATE, none, no_slot, no_slot, no_slot, none]
    assert judge_records(records, [SLAB]).tolist() == expected


def test_modes_and_leftovers_are_mended(place: Path) -> None:
    place.chmod(0o755)
    (place / SLAB.name).chmod(0o644)
    (place / "slab-9-16384.kv.new").write_bytes(b"half")
    (place / "slab-9-16384.kv.new").chmod(0o600)
    found = look(place)
    assert troubles(found.findings) == {Trouble.MODE: 1, Trouble.LEFTOVER: 1} | {Trouble.MODE: 1}
    assert {finding.places[0] for finding in found.findings} == {".", SLAB.name, "slab-9-16384.kv.new"}
    assert all(finding.mended for finding in mend(found))
    assert look(place).findings == ()
    assert place.stat().st_mode & 0o777 == 0o700
    assert not (place / "slab-9-16384.kv.new").exists()


def test_a_slab_with_holes_is_allocated(place: Path) -> None:
    os.truncate(place / SLAB.name, SLABS // 2)
    os.truncate(place / SLAB.name, SLABS)
    found = look(place)
    assert Trouble.SPARSE in troubles(found.findings)
    mend(found)
    assert look(place).findings == ()
    assert (place / SLAB.name).stat().st_blocks * 512 >= SLABS


def test_what_only_a_person_can_mend_is_left(place: Path) -> None:
    (place / "secret").write_bytes(b"short")
    (place / "cleared").write_text("nonsense\n")
    (place / "cleared").chmod(0o600)
    found = look(place, capacity_bytes=1 << 20)
    assert set(troubles(found.findings)) == {Trouble.SECRET, Trouble.CLEARED, Trouble.CAPACITY}
    assert not any(finding.mended or finding.mend for finding in mend(found))


def test_files_of_others_are_told_apart(place: Path) -> None:
    """Of a path that somebody else's file made too large fsck said that the next start would remove slabs."""
    (place / "holiday.mkv").touch(0o600)
    os.truncate(place / "holiday.mkv", 1 << 30)
    (finding,) = look(place, 1 << 30).findings
    assert (finding.trouble, finding.places) == (Trouble.CAPACITY, ("holiday.mkv",))
    assert "1GiB of it are not the service's" in finding.text
    assert "removes slabs" not in finding.text


def test_the_size_that_was_given_at_run_time_counts(place: Path) -> None:
    """A path that was made larger while it was in use was said to be larger than configured."""
    taken = sum(max(entry.nbytes, entry.allocated_bytes) for entry in look(place).entries)
    assert troubles(look(place, taken // 2).findings) == {Trouble.CAPACITY: 1}
    write_size(place, SizeNote(configured_bytes=taken // 2, resized_bytes=2 * taken))
    assert look(place, taken // 2).findings == ()
    (place / "size").write_text("nonsense")
    (place / "budget").write_text("more of it")
    (place / "budget").chmod(0o600)
    found = look(place)
    assert [finding.places for finding in found.findings] == [("size",), ("budget",)]
    assert all(finding.mended for finding in mend(found))
    assert look(place).findings == ()


def test_another_owner_is_told(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(place / SLAB.name, 12345, 12345)
    assert troubles(look(place).findings) == {Trouble.OWNER: 1}


def test_a_path_in_use_is_not_looked_at(place: Path, tmp_path: Path) -> None:
    directory = NvmeDirectory.open(place)
    with pytest.raises(AlreadyExists, match="in use by another kvstore daemon"):
        lock_existing(place)
    directory.close()
    os.close(lock_existing(place))
    with pytest.raises(ConfigError, match="is no path of kvstore"):
        lock_existing(tmp_path)


def test_a_thousand_bad_blocks_are_one_finding(place: Path) -> None:
    for slot in range(0, BLOCKS, 2):
        overwrite(place, slot * STRIDE, b"damage")
    (finding,) = look(place).findings
    assert finding.count == BLOCKS // 2
    assert len(finding.places) == 5
    assert replace(finding, count=1) != finding
