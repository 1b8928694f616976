"""What was cleared stays cleared, whatever the blocks are found by."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import Corruption
from kvstore.layout import touch_key
from kvstore.units import MIB
from tests.tiers.harness import NVME, SLABS, SLOT_BYTES, Harness
from tiers.nvme.capacity import SMALL_FILES_BYTES
from tiers.nvme.cleared import (
    EVERY_NAMESPACE,
    MAX_CLEARED,
    block_key,
    note_cleared,
    read_cleared,
    without_cleared,
)
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex
from tiers.nvme.io import NvmeTier
from tiers.nvme.recover import recover
from tiers.nvme.scan import scan_slabs
from tiers.nvme.slab import list_slabs

ONE, OTHER = (5, 6), (7, 8)  # the harness's namespace, and another


def digest(words: tuple[int, int]) -> bytes:
    return np.array(words, dtype="<u8").tobytes()


def record(namespace: tuple[int, int], touch_ms: int, depth: int = 3) -> NDArray[np.void]:
    one = np.zeros(1, dtype=RECORD)
    one["ns_digest"], one["depth"] = namespace, depth
    one["touch"] = touch_key(touch_ms, one["depth"])
    return one


def test_it_remembers_the_newest_of_each_and_folds_what_is_older(tmp_path: Path) -> None:
    assert read_cleared(tmp_path) == {}
    note_cleared(tmp_path, {digest(ONE): 100})
    note_cleared(tmp_path, {digest(ONE): 90, digest(OTHER): 300})
    assert read_cleared(tmp_path) == {digest(ONE): 100, digest(OTHER): 300}
    note_cleared(tmp_path, {EVERY_NAMESPACE: 200})
    assert read_cleared(tmp_path) == {EVERY_NAMESPACE: 200, digest(OTHER): 300}
    assert (tmp_path / "cleared").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["x 1\n", "00ff 1\n", "* soon\n", "\n"])
def test_a_damaged_file_is_said_and_not_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "cleared").write_text(text)
    with pytest.raises(Corruption, match="may come back"):
        read_cleared(tmp_path)


def test_only_older_blocks_of_that_namespace_go() -> None:
    records = np.concatenate([record(ONE, 100), record(ONE, 101), record(OTHER, 100)])
    left = without_cleared(records, {digest(ONE): 100})
    assert left.tobytes() == records[1:].tobytes()
    assert without_cleared(records, {EVERY_NAMESPACE: 100}).tobytes() == records[1:2].tobytes()
    assert without_cleared(records, {}).tobytes() == records.tobytes()


@pytest.mark.parametrize("source", ["trailers", "index"])
def test_a_start_does_not_bring_cleared_blocks_back(harness: Harness, tmp_path: Path, source: str) -> None:
    """A scan of the trailers, or an index that a kill had left behind the clear, gave cleared blocks out again."""
    tier = NvmeTier(tmp_path, harness.memory)
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    tier.transfer(harness.moves_for([0, 1]))
    tier.close()
    written = scan_slabs(tmp_path, list_slabs(tmp_path))
    assert len(written) == 2
    if source == "index":
        index = DurableIndex(tmp_path, map_bytes=MIB, durability=Durability.POWER)
        index.commit(written, np.empty(0, dtype=SLOT_REF))
        index.close()
    newest_ms = int(written["touch"].max() >> np.uint64(20))
    for cleared, left in ((digest(OTHER), 2), (digest(ONE), 0)):
        note_cleared(tmp_path, {cleared: newest_ms})
        found = recover(tmp_path, map_bytes=MIB, timeout_s=60)
        found.close()
        assert (found.blocks.blocks, bool(found.blocks.rebuilt)) == (left, source == "trailers")
        if source == "trailers":
            os.rename(tmp_path / "index", tmp_path / f"index-{left}")


def test_the_file_stays_small(tmp_path: Path) -> None:
    """One line for each namespace that was ever cleared: the file grew for ever, and counts against the capacity."""
    digests = [number.to_bytes(16, "little") for number in range(MAX_CLEARED)]
    note_cleared(tmp_path, {digest: 1000 + at for at, digest in enumerate(digests)})
    assert len(read_cleared(tmp_path)) == MAX_CLEARED
    note_cleared(tmp_path, {b"\xff" * 16: 99_999})
    kept = read_cleared(tmp_path)
    assert len(kept) <= MAX_CLEARED // 2 + 2
    every_ms = kept[EVERY_NAMESPACE]
    assert all(1000 + at <= every_ms or digest in kept for at, digest in enumerate(digests)), (
        "none comes back"
    )
    assert kept[b"\xff" * 16] == 99_999
    assert (tmp_path / "cleared").stat().st_size < SMALL_FILES_BYTES / 4


def test_a_single_block_that_was_wrong_is_passed_over_until_it_is_written_again(tmp_path: Path) -> None:
    """Its trailer outlived it, with a checksum that is right: a lost index brought it back."""
    wrong, right = record(ONE, 100), record(ONE, 100)
    wrong["hash"], right["hash"] = (1, 2), (1, 3)
    note_cleared(tmp_path, {block_key(digest((1, 2))): 100, digest(OTHER): 50})
    note_cleared(tmp_path, {block_key(digest((4, 4))): 70})
    cleared = read_cleared(tmp_path)
    assert cleared == {block_key(digest((1, 2))): 100, digest(OTHER): 50, block_key(digest((4, 4))): 70}
    again = wrong.copy()
    again["touch"] = touch_key(101, again["depth"])
    for records, left in ((wrong, 0), (right, 1), (again, 1)):
        assert len(without_cleared(records, cleared)) == left
