"""How a batch of blocks is cut before it is issued: runs of neighbours, what goes which way, portions. Pure numpy.

A batch is planned in ranges of blocks that grow from a small one, so that the first copies are under way before the
rest is looked at. A run is blocks that are neighbours on both sides: one copy. It ends where another pinned range
begins, since the driver refuses a copy that leaves the range it began in. A block in a short run stays a piece of its
own, so that every piece of the small way has one size, which the kernels rely on. Such blocks may still be neighbours
on the host's side alone, as the pages of one block's layers are: those can be staged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pieces", "portions", "ranges", "runs", "shares", "split", "staged"]

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """[n] copies."""

    sources: U64
    targets: U64
    sizes: U64

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all. O(n)."""
        return int(self.sizes.sum())

    def part(self, begin: int, end: int) -> Pieces:
        """The pieces [begin, end), shared."""
        return Pieces(
            sources=self.sources[begin:end], targets=self.targets[begin:end], sizes=self.sizes[begin:end]
        )

    @classmethod
    def none(cls) -> Pieces:
        """No copies."""
        nothing: U64 = np.empty(0, dtype=np.uint64)
        return cls(sources=nothing, targets=nothing, sizes=nothing)

    def where(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Those that are chosen."""
        return Pieces(sources=self.sources[chosen], targets=self.targets[chosen], sizes=self.sizes[chosen])


def ranges(count: int, nbytes: int, *, first_bytes: int, max_bytes: int, max_blocks: int) -> Iterator[range]:
    """Cuts `count` blocks of `nbytes`: at first about `first_bytes`, then twice as much each time up to the bounds."""
    begin, bound = 0, min(first_bytes, max_bytes)
    while begin < count:
        end = min(begin + max(1, min(bound // nbytes, max_blocks)), count)
        yield range(begin, end)
        begin, bound = end, min(2 * bound, max_bytes)


def runs(
    sources: U64, targets: U64, nbytes: int, *, borders: Sequence[U64] = (), max_run_bytes: int
) -> NDArray[np.intp]:
    """Where runs of blocks begin: [r] positions, the first is 0. O(n), and O(n log b) with borders.

    `borders`: ascending addresses at which a run may begin and which none may cross.
    """
    count = len(sources)
    step = np.uint64(nbytes)
    neighbours = (sources[1:] == sources[:-1] + step) & (targets[1:] == targets[:-1] + step)
    if not neighbours.any():
        return np.arange(count)
    for addresses in borders:
        for side in (sources, targets):
            place = np.searchsorted(addresses, side, side="right")
            neighbours &= place[1:] == place[:-1]
    begins = np.flatnonzero(np.concatenate([[True], ~neighbours]))
    lengths = np.diff(np.append(begins, count))
    within = np.arange(count) - np.repeat(begins, lengths)
    return np.flatnonzero(within % max(1, max_run_bytes // nbytes) == 0)


def split(
    sources: U64, targets: U64, nbytes: int, begins: NDArray[np.intp], *, large_from_bytes: int
) -> tuple[Pieces, Pieces]:
    """The large pieces, each a run of at least `large_from_bytes`, and the blocks of all shorter runs. O(n)."""
    lengths = np.diff(np.append(begins, len(sources)))
    large = lengths * nbytes >= large_from_bytes
    first = begins[large]
    small = np.flatnonzero(~np.repeat(large, lengths))
    return (
        Pieces(
            sources=sources[first],
            targets=targets[first],
            sizes=lengths[large].astype(np.uint64) * np.uint64(nbytes),
        ),
        Pieces(
            sources=sources[small],
            targets=targets[small],
            sizes=np.full(len(small), nbytes, dtype=np.uint64),
        ),
    )


def staged(
    pieces: Pieces, host: U64, nbytes: int, *, borders: Sequence[U64] = (), from_bytes: int
) -> tuple[Pieces, Pieces]:
    """The pieces in runs on the host's side of at least `from_bytes`, and the others. O(n).

    `host`: the pieces' addresses there, `pieces.sources` or `pieces.targets`; every piece has `nbytes`.
    """
    begins = runs(host, host, nbytes, borders=borders, max_run_bytes=1 << 62)
    lengths = np.diff(np.append(begins, len(host)))
    chosen = np.repeat(lengths * nbytes >= from_bytes, lengths)
    return pieces.where(chosen), pieces.where(~chosen)


def portions(pieces: Pieces, *, max_bytes: int, max_pieces: int) -> Iterator[Pieces]:
    """In their order, as many pieces at once as the bounds allow, and at least one."""
    ends = np.cumsum(pieces.sizes)
    begin, count = 0, len(pieces)
    while begin < count:
        before = int(ends[begin - 1]) if begin else 0
        fits = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = min(max(fits, begin + 1), begin + max_pieces, count)
        yield pieces.part(begin, end)
        begin = end


def shares(pieces: Pieces, weights: Sequence[int]) -> Iterator[Pieces]:
    """As many parts as weights, in proportion to them; a part may be empty."""
    total, begin, taken = sum(weights), 0, 0
    for weight in weights:
        taken += weight
        end = len(pieces) * taken // total
        yield pieces.part(begin, end)
        begin = end
