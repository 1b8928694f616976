"""Which blocks an export takes, and in what order: from the mapped tables, which the daemon changes meanwhile.

What is used most recently comes first, each chain from its root on, so that a file that was cut short is still of use.
What is found here is a wish: whoever reads a block proves that it is the one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Columns, State, states

__all__ = ["DIGEST_BYTES", "Planned", "handle_of", "hottest_first", "plan"]

DIGEST_BYTES = 16
"""Of a namespace's digest: two are the same when these are, since storage keeps no more."""
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Blocks to export, one element a block."""

    rows: U32
    words: U64  # state words of the rows, when this was planned
    hashes: U64  # [n, 2]
    parents: U64  # [n, 2] zeros at the root, and where the parent is not known any more
    depths: U32
    touches: U64

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, begin: int, end: int) -> Planned:
        """Blocks [begin, end)."""
        return self.take(slice(begin, end))

    def take(self, which: NDArray[np.intp] | slice) -> Planned:
        """These blocks, in this order."""
        return Planned(
            rows=self.rows[which],
            words=self.words[which],
            hashes=self.hashes[which],
            parents=self.parents[which],
            depths=self.depths[which],
            touches=self.touches[which],
        )


def handle_of(columns: Columns, digest: bytes) -> int | None:
    """Position of a namespace in the table; None where the tables do not have it."""
    short = np.frombuffer(digest[:DIGEST_BYTES], dtype=np.uint8)
    found = np.flatnonzero((columns.namespace_digest[:, :DIGEST_BYTES] == short).all(axis=1))
    return int(found[0]) if len(found) else None


def plan(columns: Columns, handle: int) -> Planned:
    """Every sealed block of a namespace, in the order of the module. O(rows + longest chain)."""
    mine = (states(columns.state) == State.SEALED) & (columns.namespace == handle)
    rows = np.flatnonzero(mine).astype(np.uint32)
    words, hashes = columns.state[rows].copy(), columns.hash[rows].copy()
    depths, touches = columns.depth[rows].copy(), columns.touch[rows].copy()
    above = _parents(columns, rows, depths)
    known = above >= 0
    parents = np.where(known[:, None], hashes[np.where(known, above, 0)], np.uint64(0))
    whole = Planned(rows=rows, words=words, hashes=hashes, parents=parents, depths=depths, touches=touches)
    return whole.take(hottest_first(above, depths, touches))


def _parents(columns: Columns, rows: U32, depths: U32) -> NDArray[np.int64]:
    """[n] position of each row's parent among `rows`; -1 where it has left the table, or its row is another's now."""
    position = np.full(len(columns.state), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    named = columns.parent[rows]
    known = (named != NONE) & (depths > 0)
    parents = np.where(known, position[np.where(known, named, 0)], -1)
    known = parents >= 0
    known[known] = depths[parents[known]] + 1 == depths[known]
    return np.where(known, parents, -1)


def hottest_first(parents: NDArray[np.int64], depths: U32, touches: U64) -> NDArray[np.intp]:
    """Positions of blocks in the order of the module. `parents`: position of each block's parent, -1: none."""
    return np.lexsort((depths, np.iinfo(np.uint64).max - _hottest_below(parents, depths, touches)))


def _hottest_below(parents: NDArray[np.int64], depths: U32, touches: U64) -> U64:
    """[n] the newest touch of each block and of all that stand on it: a parent's is never older than its child's."""
    newest = touches >> np.uint64(20)  # below it a touch key has the depth
    by_depth = np.argsort(depths, kind="stable")
    starts = np.searchsorted(depths[by_depth], np.arange(1, int(depths.max()) + 1 if len(depths) else 1))
    for begin, end in reversed([*zip(starts, [*starts[1:], len(depths)], strict=True)]):
        level = by_depth[begin:end]
        level = level[parents[level] >= 0]
        np.maximum.at(newest, parents[level], newest[level])
    return newest
