"""The durable index, and rebuilding it from the trailers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import ConfigError, Corruption, ResourceExhausted, Unavailable
from kvstore.layout import touch_key
from kvstore.moves import MoveStatus
from tests.tiers.harness import NVME, SLABS, SLOT_BYTES, Harness
from tiers.nvme import index as index_module
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex, load_index, remove_index
from tiers.nvme.io import NvmeTier
from tiers.nvme.recover import FoundBlocks, recover
from tiers.nvme.scan import scan_slabs
from tiers.nvme.slab import list_slabs, slots_in

MAP_BYTES = 8 << 20
NONE = np.empty(0, dtype=SLOT_REF)
NO_RECORDS = np.empty(0, dtype=RECORD)


def records(slab: int, slots: list[int], generation: int = 1) -> NDArray[np.void]:
    made = np.zeros(len(slots), dtype=RECORD)
    made["slab"], made["slot"], made["generation"] = slab, slots, generation
    made["length"], made["depth"] = SLOT_BYTES, slots
    made["touch"] = touch_key(1000, made["depth"])
    made["hash"][:, 0] = np.array(slots) + 1
    made["hash"][:, 1] = slab
    made["parent"][:, 0] = slots
    made["ns_digest"] = (5, 6)
    return made


def refs(slab: int, slots: list[int]) -> NDArray[np.void]:
    made = np.zeros(len(slots), dtype=SLOT_REF)
    made["slab"], made["slot"] = slab, slots
    return made


@pytest.fixture(params=[Durability.PROCESS, Durability.POWER], ids=lambda durability: durability.value)
def durability(request: pytest.FixtureRequest) -> Durability:
    value: Durability = request.param
    return value


def reopened(index: DurableIndex, directory: Path, durability: Durability) -> DurableIndex:
    index.close()
    return DurableIndex(directory, map_bytes=MAP_BYTES, durability=durability)


def test_what_is_published_is_loaded(tmp_path: Path, durability: Durability) -> None:
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=durability)
    slots = [0, 1, 127, 128, 1000, 70000]
    index.commit(records(3, slots), NONE)
    index.commit(records(2, [5]), NONE)
    index = reopened(index, tmp_path, durability)
    assert np.array_equal(index.load(), np.concatenate([records(2, [5]), records(3, slots)]))
    index.close()
    assert np.array_equal(load_index(tmp_path), np.concatenate([records(2, [5]), records(3, slots)]))


def test_freed_slots_are_gone_and_a_slot_given_again_is_the_new_block(tmp_path: Path) -> None:
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER)
    index.commit(records(1, [0, 1, 2, 200]), NONE)
    index.commit(records(1, [1], generation=2), refs(1, [0, 1, 200, 999]))
    loaded = index.load()
    assert loaded["slot"].tolist() == [1, 2]
    assert loaded["generation"].tolist() == [2, 1]
    index.close()


def test_against_a_dictionary(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.PROCESS)
    model: dict[tuple[int, int], int] = {}
    for generation in range(1, 60):
        slots = rng.choice(600, size=40, replace=False)
        slab = int(rng.integers(1, 4))
        publish, free = slots[:25].tolist(), slots[25:].tolist()
        index.commit(records(slab, publish, generation), refs(slab, free))
        model |= {(slab, slot): generation for slot in publish}
        for slot in free:
            model.pop((slab, slot), None)
        if generation == 40:
            index.drop_slab(2)
            model = {key: value for key, value in model.items() if key[0] != 2}
    loaded = index.load()
    found = zip(loaded["slab"].tolist(), loaded["slot"].tolist(), loaded["generation"].tolist(), strict=True)
    assert {(slab, slot): generation for slab, slot, generation in found} == model
    index.close()


def test_a_full_map_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    index = DurableIndex(tmp_path, map_bytes=1 << 20, durability=Durability.POWER)
    index.commit(records(1, [0]), NONE)
    with pytest.raises(ResourceExhausted, match="full"):
        index.commit(records(1, list(range(0, 128 * 200, 128))), NONE)
    assert index.load()["slot"].tolist() == [0]
    index.commit(records(1, [1]), NONE)
    assert index.load()["slot"].tolist() == [0, 1]
    index.close()


def test_index_files_are_private(tmp_path: Path) -> None:
    DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER).close()
    assert (tmp_path / "index").stat().st_mode & 0o077 == 0
    for file in (tmp_path / "index").iterdir():
        assert file.stat().st_mode & 0o077 == 0


def fill(directory: Path, harness: Harness) -> NvmeTier:
    """A tier with blocks in slots 0 to 9."""
    tier = NvmeTier(directory, harness.memory)
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    for slot in range(10):
        harness.fill(slot)
    assert not tier.transfer(harness.moves_for(list(range(10))))["status"].any()
    return tier


def test_scan_finds_every_block_that_is_whole(tmp_path: Path, harness: Harness) -> None:
    fill(tmp_path, harness)
    found = scan_slabs(tmp_path, list_slabs(tmp_path))
    assert found["slot"].tolist() == list(range(10))
    moves = harness.moves_for(list(range(10)))
    for name in ("hash", "parent", "ns_digest", "generation", "length", "depth"):
        assert np.array_equal(found[name], moves[name])
    tail_first = (
        found["touch"][:-1].astype(np.int64) & 0xFFFFF > found["touch"][1:].astype(np.int64) & 0xFFFFF
    )
    assert tail_first.all()


def test_scan_keeps_the_newest_of_two_copies(tmp_path: Path, harness: Harness) -> None:
    """The same block in a slot that was freed and in another was two rows of one hash."""
    tier = fill(tmp_path, harness)
    later = harness.write([3], [50], generation=9)
    later["hash"] = harness.write([3], [3])["hash"]
    time.sleep(0.003)
    tier.transfer(later)
    found = scan_slabs(tmp_path, list_slabs(tmp_path))
    assert found["slot"].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 50]
    assert found["generation"].tolist()[-1] == 9


def look(directory: Path) -> FoundBlocks:
    """What a start finds, in numbers."""
    found = recover(directory, map_bytes=MAP_BYTES, timeout_s=30)
    found.close()
    return found.blocks


def test_recover_reads_the_index(tmp_path: Path, harness: Harness) -> None:
    fill(tmp_path, harness)
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER)
    beyond = slots_in(SLABS, SLOT_BYTES)
    index.commit(np.concatenate([records(1, [0, 4, beyond]), records(8, [3])]), NONE)
    index.close()
    found = look(tmp_path)
    assert found.rebuilt == ""
    assert (found.blocks, dict(found.used), found.strays) == (
        2,
        {1: 2},
        2,
    )  # the others name slots that no slab has
    assert found.clean


def garbage(file: Path) -> None:
    file.write_bytes(b"\xa5" * 65536)


def truncated(file: Path) -> None:
    with file.open("r+b") as data:
        data.truncate(3 * 4096)


def scrambled(file: Path) -> None:
    size = file.stat().st_size
    rng = np.random.default_rng(1)
    with file.open("r+b") as data:
        data.seek(2 * 4096)
        data.write(rng.integers(0, 256, size - 2 * 4096, dtype=np.uint8).tobytes())


@pytest.mark.parametrize("damage", [Path.unlink, garbage, truncated, scrambled])
def test_a_lost_index_is_rebuilt_from_the_trailers(tmp_path: Path, harness: Harness, damage: object) -> None:
    """A damaged index took the whole disk tier with it, or killed the daemon that read it."""
    tier = fill(tmp_path, harness)
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER)
    for generation in range(5):
        index.commit(records(1, list(range(0, 2000, 3)), generation), NONE)
    index.close()
    assert callable(damage)
    damage(tmp_path / "index" / "data.mdb")
    found = look(tmp_path)
    assert found.rebuilt
    assert found.blocks == 10
    entered = load_index(tmp_path)
    assert entered["slot"].tolist() == list(range(10))
    assert not tier.transfer(harness.moves_back(entered["slot"].tolist()))["status"].any()
    again = look(tmp_path)
    assert again.rebuilt == ""
    assert again.blocks == 10


def test_after_a_power_cut_an_index_that_was_not_flushed_is_not_trusted(tmp_path: Path) -> None:
    """An LMDB file written without fsync was read after a power cut as if it were whole."""
    script = (
        "import sys, os\nfrom pathlib import Path\nfrom kvstore.config import Durability\n"
        "from tests.tiers.nvme.test_index import *\n"
        "index = DurableIndex(Path(sys.argv[1]), map_bytes=MAP_BYTES, durability=Durability.PROCESS)\n"
        "index.commit(records(1, [0, 1]), NONE)\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert load_index(tmp_path)["slot"].tolist() == [0, 1]  # this boot's page cache has it
    mark = tmp_path / "index" / "unsynced"
    this_boot = mark.read_text(encoding="ascii")
    mark.write_text("another boot\n", encoding="ascii")
    with pytest.raises(Corruption, match="not flushed"):
        load_index(tmp_path)
    with pytest.raises(Corruption, match="not flushed"):
        DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.PROCESS)
    mark.write_text(this_boot, encoding="ascii")
    DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER).close()
    assert not mark.exists()
    assert load_index(tmp_path)["slot"].tolist() == [0, 1]


def test_a_start_killed_while_it_makes_the_index_anew_loses_no_block(
    tmp_path: Path, harness: Harness
) -> None:
    """The index was made anew empty and synced before its blocks were entered: after a kill between the two the next
    start believed it, knew no block and deleted the slabs."""
    fill(tmp_path, harness)
    script = (
        "import os, sys\nfrom tiers.nvme import recover\n"
        "recover.DurableIndex.commit = lambda *_: os.kill(os.getpid(), 9)\nrecover.main(sys.argv[1:])\n"
    )
    child = [sys.executable, "-c", script, str(tmp_path), "scan", str(MAP_BYTES), "0"]
    assert subprocess.run(child, timeout=60, check=False, stdin=subprocess.DEVNULL).returncode == -9
    with pytest.raises(Corruption):
        load_index(tmp_path)
    found = look(tmp_path)
    assert (found.blocks, bool(found.rebuilt)) == (10, True)


def test_the_file_of_an_index_goes_before_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete of the index could take the mark of a power cut first: killed there, it left a torn file that was
    believed."""
    DurableIndex.anew(tmp_path, map_bytes=MAP_BYTES, durability=Durability.PROCESS).close()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_index(tmp_path)
    assert [file.name for file in (tmp_path / "index").glob("data*")] == []
    assert (tmp_path / "index" / "unsynced").exists()


@pytest.mark.parametrize("theirs", [b"1", b"99"], ids=["older", "newer"])
def test_an_index_of_another_format_is_refused_and_kept(
    tmp_path: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch, theirs: bytes
) -> None:
    """An index that another version had written was deleted and made anew without a word."""
    fill(tmp_path, harness)
    monkeypatch.setattr(index_module, "_VERSION", theirs)
    DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER).close()
    monkeypatch.undo()
    before = (tmp_path / "index" / "data.mdb").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"of format {theirs.decode()}, this kvstore reads 2; .* fsck --repair"
    ):
        look(tmp_path)
    with pytest.raises(ConfigError, match="of format"):
        DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER)
    assert (tmp_path / "index" / "data.mdb").read_bytes() == before


def test_a_disk_that_hangs_does_not_hang_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start waited for ever for a disk that answered no more."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 120\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr("tiers.nvme.recover.sys.executable", str(sleeper))
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="not read within"):
        recover(tmp_path, map_bytes=MAP_BYTES, timeout_s=0.2)
    assert time.monotonic() - begin < 60


def test_a_slab_that_is_no_more_takes_its_records_with_it(tmp_path: Path, harness: Harness) -> None:
    tier = fill(tmp_path, harness)
    index = DurableIndex(tmp_path, map_bytes=MAP_BYTES, durability=Durability.POWER)
    index.commit(records(1, [0, 1]), NONE)
    index.close()
    tier.drop_slab(NVME)
    found = look(tmp_path)
    assert (found.blocks, found.strays) == (0, 2)


def test_a_block_is_served_after_everything_but_the_disk_is_gone(tmp_path: Path, harness: Harness) -> None:
    expected = harness.fill(3)
    first = NvmeTier(tmp_path, harness.memory)
    first.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    first.transfer(harness.moves_for([3]))
    first.sync()
    first.close()
    assert look(tmp_path).rebuilt
    found = load_index(tmp_path)
    second = NvmeTier(tmp_path, harness.memory)
    (file,) = list_slabs(tmp_path)
    second.open_slab(NVME, file.number, file.nbytes, file.slot_bytes)
    moves = harness.moves_back(found["slot"].tolist())
    assert second.transfer(moves)["status"].tolist() == [MoveStatus.OK]
    assert np.array_equal(harness.bytes[35], expected)
