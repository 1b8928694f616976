"""What is wrong with a path that no service uses: findings over what `tiers.nvme.verify` has read. Pure.

A block is wrong only where the index says that it is there. A slot that the index does not name may hold anything: the
remains of a block that was evicted, or of a write that was never acknowledged.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.units import format_size
from tiers.nvme.capacity import is_own
from tiers.nvme.slab import SlabFile, stride_bytes
from tiers.nvme.trailer import Trailer

__all__ = [
    "Entry",
    "Finding",
    "Trouble",
    "findings_of_blocks",
    "judge_files",
    "judge_record",
    "judge_records",
    "judge_size",
]

_MOST_PLACES = 5


class Trouble(IntEnum):
    """What can be wrong. Those of a block come first: their numbers are kept one a block."""

    NONE = 0
    UNREADABLE = 1
    NO_TRAILER = 2
    OTHER_BLOCK = 3
    CHECKSUM = 4
    NO_SLOT = 5
    DUPLICATE = 6
    MODE = 7
    OWNER = 8
    LEFTOVER = 9
    SECRET = 10
    CLEARED = 11
    INDEX = 12
    SPARSE = 13
    CAPACITY = 14
    NOTE = 15


TEXTS = {
    Trouble.UNREADABLE: "the disk does not give the block back",
    Trouble.NO_TRAILER: "no whole trailer stands behind the block",
    Trouble.OTHER_BLOCK: "the slot holds another block than the index says",
    Trouble.CHECKSUM: "the bytes are not those that were written",
    Trouble.NO_SLOT: "the index names a slot that is not there",
    Trouble.DUPLICATE: "the index has the block twice",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or several of a kind."""

    trouble: Trouble
    places: tuple[str, ...]
    """Where: file names, or `slab N slot M`; the first few of many."""
    text: str
    mend: str
    """What a repair does about it; empty: a person has to."""
    count: int = 1
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of the path, or the path itself (`.`)."""

    name: str
    mode: int
    """As stat gives it."""
    uid: int
    nbytes: int
    allocated_bytes: int


def judge_files(entries: Iterable[Entry], uid: int) -> list[Finding]:
    """Modes, owners, leftovers of a crash, slabs that are not allocated in full. `uid`: who should own them."""
    found: list[Finding] = []
    for entry in entries:
        wanted = 0o700 if stat.S_ISDIR(entry.mode) else 0o600
        mode = stat.S_IMODE(entry.mode)
        if mode & 0o077:
            text = f"others may reach it (mode {mode:04o}): blocks are plaintext prompts"
            found.append(_of_file(Trouble.MODE, entry, text, f"makes it {wanted:04o}"))
        if entry.uid != uid:
            text = f"belongs to uid {entry.uid}, not {uid}: the service would not start, or not read it"
            found.append(_of_file(Trouble.OWNER, entry, text, ""))
        if entry.name.endswith(".new"):
            found.append(_of_file(Trouble.LEFTOVER, entry, "a crash left it half made", "deletes it"))
        elif entry.name.endswith(".kv") and entry.allocated_bytes < entry.nbytes:
            missing = format_size(entry.nbytes - entry.allocated_bytes)
            text = f"{missing} of it are not allocated: writes into it may find the disk full"
            found.append(_of_file(Trouble.SPARSE, entry, text, "allocates them"))
    return found


def _of_file(trouble: Trouble, entry: Entry, text: str, mend: str) -> Finding:
    return Finding(trouble=trouble, places=(entry.name,), text=text, mend=mend)


def judge_size(entries: Iterable[Entry], capacity_bytes: int) -> list[Finding]:
    """Whether all of it together is more than was configured, and whose files make it so."""
    files = {
        entry.name: max(entry.nbytes, entry.allocated_bytes)
        for entry in entries
        if not stat.S_ISDIR(entry.mode)
    }
    taken = sum(files.values())
    if taken <= capacity_bytes:
        return []
    text = f"takes {format_size(taken)}, and {format_size(capacity_bytes)} is configured: "
    foreign = sorted((name for name in files if not is_own(name)), key=lambda name: -files[name])
    theirs = sum(files[name] for name in foreign)
    if taken - theirs > capacity_bytes:
        text += "the next start removes slabs"
        return [Finding(trouble=Trouble.CAPACITY, places=(".",), text=text, mend="")]
    text += f"{format_size(theirs)} of it are not the service's, which makes no slab in their place: move them out"
    places = tuple(foreign[:_MOST_PLACES])
    return [Finding(trouble=Trouble.CAPACITY, places=places, text=text, mend="", count=len(foreign))]


def judge_records(records: NDArray[np.void], slabs: Sequence[SlabFile]) -> NDArray[np.uint8]:
    """[n] Trouble of RECORD[] by themselves: slots that are not there, and all but the last used of one block."""
    troubles = np.full(len(records), Trouble.NO_SLOT, dtype=np.uint8)
    for file in slabs:
        there = (records["slab"] == file.number) & (records["slot"] < file.slots)
        troubles[there & (records["length"] == file.slot_bytes)] = Trouble.NONE
    newest = np.argsort(np.iinfo(np.uint64).max - records["touch"], kind="stable")
    newest = newest[troubles[newest] == Trouble.NONE]
    keys = np.concatenate((records["hash"][newest], records["ns_digest"][newest]), axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    again = np.ones(len(newest), dtype=np.bool_)
    again[first] = False
    troubles[newest[again]] = Trouble.DUPLICATE
    return troubles


def judge_record(record: np.void, trailer: Trailer | None, digest: bytes) -> Trouble:
    """One block that was read. `digest`: checksum of its payload as it is now.

    Parent and last use are hints, which index and trailer may tell differently.
    """
    if trailer is None:
        return Trouble.NO_TRAILER
    length = int(record["length"])
    same = (
        trailer.offset == int(record["slot"]) * stride_bytes(length)
        and trailer.length == length
        and trailer.generation == int(record["generation"])
        and trailer.depth == int(record["depth"])
        and trailer.hash == record["hash"].tobytes()
        and trailer.ns_digest == record["ns_digest"].tobytes()
    )
    if not same:
        return Trouble.OTHER_BLOCK
    return Trouble.NONE if trailer.checksum == digest else Trouble.CHECKSUM


def findings_of_blocks(records: NDArray[np.void], troubles: NDArray[np.uint8]) -> list[Finding]:
    """One finding for each kind of trouble, with its first places."""
    found = []
    for number in np.unique(troubles[troubles != Trouble.NONE]).tolist():
        trouble = Trouble(number)
        bad = records[troubles == number]
        places = tuple(f"slab {one['slab']} slot {one['slot']}" for one in bad[:_MOST_PLACES])
        mend = "takes it out of the index: the next request computes it"
        if trouble is Trouble.DUPLICATE:
            mend = "keeps the one used last"
        found.append(Finding(trouble=trouble, places=places, text=TEXTS[trouble], mend=mend, count=len(bad)))
    return found
