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

__all__ = ["Pieces", "lengths", "portions", "ranges", "runs", "shares", "split", "staged"]

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
    """Where runs of blocks begin: [r] positions, the first is 0. O(n), and O(n log b) where runs cross borders.

    `borders`: ascending addresses at which a run may begin and which none may cross.
    """
    count = len(sources)
    step = np.uint64(nbytes)
    neighbours = sources[1:] == sources[:-1] + step
    if targets is not sources:
        neighbours &= targets[1:] == targets[:-1] + step
    if not neighbours.any():
        return np.arange(count)
    begins = _begins(neighbours)
    spans = lengths(begins, count)
    crossed = [
        (addresses, side)
        for addresses in borders
        for side in ((sources,) if targets is sources else (sources, targets))
        if _parted(addresses, side[begins], side[begins + spans - 1]).any()
    ]
    if crossed:  # seldom: only then is every block looked up
        for addresses, side in crossed:
            neighbours &= ~_parted(addresses, side[:-1], side[1:])
        begins = _begins(neighbours)
        spans = lengths(begins, count)
    longest = max(1, max_run_bytes // nbytes)
    if spans.max() <= longest:
        return begins
    within = np.arange(count) - np.repeat(begins, spans)
    return np.flatnonzero(within % longest == 0)


def _begins(neighbours: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Of n blocks, of which [n - 1] are the neighbour of the one before."""
    return np.concatenate([np.zeros(1, dtype=np.intp), np.flatnonzero(~neighbours) + 1])


def lengths(begins: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Of the runs of `count` blocks."""
    ends = np.empty_like(begins)
    ends[:-1] = begins[1:]
    ends[-1:] = count
    return ends - begins


def _parted(borders: U64, before: U64, after: U64) -> NDArray[np.bool_]:
    """Where a border lies above the one and not above the other."""
    parted: NDArray[np.bool_] = np.searchsorted(borders, before, side="right") != np.searchsorted(
        borders, after, side="right"
    )
    return parted


def split(
    sources: U64, targets: U64, nbytes: int, begins: NDArray[np.intp], *, large_from_bytes: int
) -> tuple[Pieces, Pieces]:
    """The large pieces, each a run of at least `large_from_bytes`, and the blocks of all shorter runs. O(n)."""
    count = len(sources)
    if len(begins) == count:
        alone = Pieces(sources=sources, targets=targets, sizes=np.full(count, nbytes, dtype=np.uint64))
        return (alone, Pieces.none()) if nbytes >= large_from_bytes else (Pieces.none(), alone)
    spans = lengths(begins, count)
    large = spans * nbytes >= large_from_bytes
    first = begins[large]
    small = np.flatnonzero(~np.repeat(large, spans))
    return (
        Pieces(
            sources=sources[first],
            targets=targets[first],
            sizes=spans[large].astype(np.uint64) * np.uint64(nbytes),
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
    spans = lengths(begins, len(host))
    if (spans * nbytes >= from_bytes).all():
        return pieces, Pieces.none()
    chosen = np.repeat(spans * nbytes >= from_bytes, spans)
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
