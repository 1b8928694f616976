"""The index: hash → row, bucketed two-choice, in memory that the caller gives.

A hash has two candidate buckets of eight entries; an entry is a 32-bit tag and a row, and the row's own hash decides
(blocks.hash), so a torn or stale entry can only cost a miss. No tombstones and no growth: lookups cost the same under
any turnover (FACTS: linear probing goes from 0.8 to 6.3 ms a 4,096). One writer, the daemon; readers in other
processes map it read-only. After: Azar et al., "Balanced Allocations" (STOC'94), and cuckoo filters' tags (CoNEXT'14).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import BUCKET_ENTRIES, NONE, Columns, State

__all__ = ["Index", "enter", "look_up", "tags_of"]

_CONTIGUOUS_MIN = 512
"""After a shorter run the vector probe of all the rest is sooner than going on run by run: 0.5-0.9 against 5.7 ms for
4,096 blocks in runs of 64."""
_STATE_MASK = np.uint64(0xFF)
_FREE = np.uint64(State.FREE)
_TAG_SHIFT = np.uint64(32)


class Index:
    """Vectorised operations over the `tags` and `rows` columns. Not thread-safe for writers."""

    __slots__ = ("_columns", "_mask")

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._mask = np.uint64(len(columns.tags) - 1)

    def clear(self) -> None:
        """Forgets everything. O(buckets)."""
        self._columns.rows.fill(NONE)
        self._columns.tags.fill(0)

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Row of each hash, NONE where there is none: [n]. O(n), two cache misses a hash."""
        return look_up(self._columns.tags, self._columns.rows, self._columns.hash, hashes)

    def locate(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """As `find`, for a chain: its rows tend to be contiguous, so compare runs before probing. O(n).

        Expects the rows of removed hashes to be FREE. Seen: 0.12-0.20 ms for 4,096 blocks where `find` takes 0.3-2.5.
        """
        total = len(hashes)
        rows: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        at, run = 0, total
        while at < total and run >= min(total, _CONTIGUOUS_MIN):
            row = self._find_one(int(hashes[at, 0]), int(hashes[at, 1]))
            if row == NONE:
                break
            end = row + total - at
            same = _equal(self._columns.hash[row:end], hashes[at:])
            # A row that left the index may still have its hash.
            same &= (self._columns.state[row:end] & _STATE_MASK) != _FREE
            run = len(same) if same.all() else int(same.argmin())
            behind = np.arange(row, row + run, dtype=np.uint32)
            rows = np.concatenate((rows, behind)) if at else behind  # most chains are one run
            at += run
        if at < total:
            rest = self.find(hashes[at:])
            rows = np.concatenate((rows, rest)) if at else rest
        return rows

    def insert(self, hashes: NDArray[np.uint64], rows: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Enters rows under hashes that are distinct and not in the index yet.

        Returns: [n] whether it was entered; False where both buckets are full (a block that then is not cached).
        O(n), a few rounds where several hashes of the batch choose one bucket.
        """
        return enter(self._columns.tags, self._columns.rows, hashes, rows)

    def remove(self, hashes: NDArray[np.uint64], rows: NDArray[np.uint32]) -> None:
        """Takes out the entries of these rows; those that are not there are passed over. O(n)."""
        for word in (0, 1):
            bucket = (hashes[:, word] & self._mask).astype(np.int64)
            found = np.flatnonzero(self._columns.rows.take(bucket, axis=0) == rows[:, None])
            at = bucket[found // BUCKET_ENTRIES] * BUCKET_ENTRIES + found % BUCKET_ENTRIES
            self._columns.rows.reshape(-1)[at] = NONE
            # Else each later look for a removed block would pay for what looks like a collision of tags.
            self._columns.tags.reshape(-1)[at] = 0

    def entries(self) -> NDArray[np.uint32]:
        """Every row that is entered, in no order. O(buckets)."""
        rows: NDArray[np.uint32] = self._columns.rows[self._columns.rows != NONE]
        return rows

    def _find_one(self, first: int, second: int) -> int:
        """Row of one hash, by its words, or NONE: in plain numbers, at a third of what vectors of one cost."""
        columns, tag, mask = self._columns, second >> 32, len(self._columns.tags) - 1
        for bucket in (first & mask, second & mask):
            for entry, found in enumerate(columns.tags[bucket].tolist()):
                if found == tag:
                    row = int(columns.rows[bucket, entry])
                    if row < columns.shape.max_rows and columns.hash[row].tolist() == [first, second]:
                        return row
        return NONE


def look_up(
    tags: NDArray[np.uint32],
    entries: NDArray[np.uint32],
    entered: NDArray[np.uint64],
    hashes: NDArray[np.uint64],
) -> NDArray[np.uint32]:
    """Entry of each hash, NONE where there is none: [n]. `entered[entry]` is the hash that it is of. O(n)."""
    found = _probe(tags, entries, entered, hashes[:, 0], hashes)
    rest = np.flatnonzero(found == NONE)
    if len(rest):
        found[rest] = _probe(tags, entries, entered, hashes[rest, 1], hashes[rest])
    return found


def enter(
    tags: NDArray[np.uint32],
    entries: NDArray[np.uint32],
    hashes: NDArray[np.uint64],
    new: NDArray[np.uint32],
) -> NDArray[np.bool_]:
    """Enters `new` under hashes that are distinct and not there yet: [n] whether each was; see Index.insert."""
    mask = np.uint64(len(tags) - 1)
    done = np.zeros(len(hashes), dtype=np.bool_)
    own_tags = tags_of(hashes)
    buckets = np.stack([hashes[:, 0] & mask, hashes[:, 1] & mask], axis=1).astype(np.int64)
    todo = np.arange(len(hashes))
    while len(todo):
        free = (entries[buckets[todo]] == NONE).sum(axis=2)  # [n, 2]
        choice = free.argmax(axis=1)
        target = buckets[todo, choice]
        open_ = free[np.arange(len(todo)), choice] > 0
        todo, target = todo[open_], target[open_]
        _, winners = np.unique(target, return_index=True)  # one a bucket and round
        bucket, key = target[winners], todo[winners]
        entry = (entries[bucket] == NONE).argmax(axis=1)
        tags[bucket, entry] = own_tags[key]
        entries[bucket, entry] = new[key]
        done[key] = True
        todo = todo[~done[todo]]
    return done


def _probe(
    tags: NDArray[np.uint32],
    entries: NDArray[np.uint32],
    entered: NDArray[np.uint64],
    words: NDArray[np.uint64],
    hashes: NDArray[np.uint64],
) -> NDArray[np.uint32]:
    """Entry of each hash in the one bucket that its `words` element chooses.

    Looks at the row of every entry whose tag agrees: one a hash that is there, next to none for one that is not.
    """
    buckets = (words & np.uint64(len(tags) - 1)).astype(np.int64)
    agree = np.flatnonzero(tags.take(buckets, axis=0) == tags_of(hashes)[:, None])
    n, entry = agree // BUCKET_ENTRIES, agree % BUCKET_ENTRIES
    rows = entries.reshape(-1).take(buckets.take(n) * BUCKET_ENTRIES + entry)
    inside = rows < len(entered)
    if not inside.all():  # a removed entry, or one that is being written
        n, rows = n[inside], rows[inside]
    right = _equal(entered.take(rows, axis=0), hashes.take(n, axis=0))
    found = np.full(len(hashes), NONE, dtype=np.uint32)
    found[n[right]] = rows[right]
    return found


def tags_of(hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """[n] bits of the hash that choose no bucket: one compare of an entry instead of a look at its row."""
    return (hashes[:, 1] >> _TAG_SHIFT).astype(np.uint32)


def _equal(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[shorter] whether hashes are equal, both words (a reduction over an axis of two takes four times as long)."""
    n = min(len(left), len(right))
    same: NDArray[np.bool_] = (left[:n, 0] == right[:n, 0]) & (left[:n, 1] == right[:n, 1])
    return same
