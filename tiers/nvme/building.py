"""From a durable index to the tables of its blocks: two passes over it, the first to count, the second to fill.

Runs in the child that `tiers.nvme.recover` starts, and in this process where the blocks are in memory anyway. Between
the passes the daemon says which slabs stay, which rows and slots are put aside, and what it calls the namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import latest_touch_ms
from kvstore.moves import U32, U64
from kvstore.tables.prebuilt import Blocks, LoadPlan, Prebuilder
from tiers.nvme.cleared import is_cleared
from tiers.nvme.index import RECORD, IndexChunk, records_of
from tiers.nvme.slab import SlabFile

__all__ = ["Chunks", "Pick", "Survey", "build", "chunks_of", "extremes", "survey"]

Chunks = Callable[[], Iterator[IndexChunk]]
"""Begins a pass over all blocks, by slab and slot."""

_DEPTH_BITS = np.uint64((1 << 20) - 1)
_CHUNK_RECORDS = 1 << 15


def chunks_of(records: NDArray[np.void]) -> Chunks:
    """Passes over RECORD[], by slab and slot."""

    def passes() -> Iterator[IndexChunk]:
        edges = np.flatnonzero(np.diff(records["slab"].astype(np.int64))) + 1
        for part in np.split(records, edges):
            for at in range(0, len(part), _CHUNK_RECORDS):
                some = part[at : at + _CHUNK_RECORDS]
                for length in np.unique(some["length"]).tolist():
                    chosen = some[some["length"] == length]
                    yield IndexChunk(
                        slab=int(chosen["slab"][0]),
                        length=length,
                        slots=chosen["slot"],
                        hashes=chosen["hash"],
                        parents=chosen["parent"],
                        digests=chosen["ns_digest"],
                        touches=chosen["touch"],
                        generations=chosen["generation"],
                    )

    return passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Which blocks of an index are to be believed and wanted."""

    slots: Mapping[int, tuple[int, int]]
    """Slots and their size of each slab that counts."""
    cleared: Mapping[bytes, int]
    refused: U64
    """[n, 2] digests of namespaces that there is no room for."""
    damaged: frozenset[tuple[int, int]] = frozenset()
    """(slab, slot) of those whose trailers say something else."""

    @classmethod
    def of(cls, slabs: Sequence[SlabFile], cleared: Mapping[bytes, int]) -> Pick:
        """What is in these slabs and was not cleared."""
        slots = {file.number: (file.slots, file.slot_bytes) for file in slabs}
        return cls(slots=slots, cleared=cleared, refused=np.empty((0, 2), dtype=np.uint64))

    def known(self, chunk: IndexChunk) -> IndexChunk:
        """Those of a chunk whose slot exists."""
        slots, slot_bytes = self.slots.get(chunk.slab, (0, 0))
        if chunk.length != slot_bytes:
            slots = 0
        return _those(chunk, chunk.slots < slots)

    def wanted(self, chunk: IndexChunk) -> IndexChunk:
        """Those of a chunk that count."""
        found = self.known(chunk)
        if self.cleared:
            found = _those(found, ~is_cleared(found.digests, found.hashes, found.touches, self.cleared))
        for digest in self.refused:
            found = _those(found, (found.digests != digest).any(axis=1))
        if self.damaged:
            gone = [slot for slab, slot in self.damaged if slab == found.slab]
            found = _those(found, ~np.isin(found.slots, np.array(gone, dtype=np.uint32)))
        return found


def _those(chunk: IndexChunk, good: NDArray[np.bool_]) -> IndexChunk:
    if good.all():
        return chunk
    names = ("slots", "hashes", "parents", "digests", "touches", "generations")
    return replace(chunk, **{name: getattr(chunk, name)[good] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a first pass found."""

    used: Mapping[int, int]
    """Blocks of each slab that has any."""
    last_uses: Mapping[int, int]
    """Median of the touches of each slab that has any block: what is least was used longest ago."""
    digests: tuple[bytes, ...]
    """Of all namespaces, 16 bytes each."""
    touches: U64
    """[blocks] in the order of the pass."""
    strays: int
    """Records that name no slot of any slab."""
    newest_ms: int
    """The last use of any of them, or the last clear, whichever is later; 0 where there was none."""

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.touches)


def survey(chunks: Chunks, pick: Pick) -> Survey:
    """The first pass. O(blocks)."""
    touches: list[U64] = [np.empty(0, dtype=np.uint64)]
    by_slab: dict[int, list[U64]] = {}
    digests: set[bytes] = set()
    strays = 0
    for chunk in chunks():
        strays += len(chunk.slots) - len(pick.known(chunk).slots)
        found = pick.wanted(chunk)
        if len(found.slots):
            by_slab.setdefault(chunk.slab, []).append(found.touches)
            touches.append(found.touches)
            digests.update(_digests(found.digests))
    seen = np.concatenate(touches)
    return Survey(
        used={slab: sum(map(len, parts)) for slab, parts in by_slab.items()},
        last_uses={slab: int(np.median(np.concatenate(parts))) for slab, parts in by_slab.items()},
        digests=tuple(sorted(digests)),
        touches=seen,
        strays=strays,
        newest_ms=max(latest_touch_ms(seen), *pick.cleared.values(), 0),
    )


def extremes(chunks: Chunks, pick: Pick, count: int) -> NDArray[np.void]:
    """RECORD[] of the `count` blocks that were used last and of as many that were used longest ago. O(blocks)."""
    newest, oldest = np.empty(0, dtype=RECORD), np.empty(0, dtype=RECORD)
    for chunk in chunks():
        found = pick.wanted(chunk)
        order = np.argsort(found.touches, kind="stable")
        newest = np.concatenate((newest, records_of(found, order[-count:])))
        oldest = np.concatenate((oldest, records_of(found, order[:count])))
        newest = newest[np.argsort(newest["touch"], kind="stable")[-count:]]
        oldest = oldest[np.argsort(oldest["touch"], kind="stable")[:count]]
    return np.concatenate((newest, oldest))


def _digests(digests: U64) -> Iterable[bytes]:
    """Distinct digests; chains lie together, so that there are few places where one follows another."""
    change = np.ones(len(digests), dtype=np.bool_)
    change[1:] = (digests[1:, 0] != digests[:-1, 0]) | (digests[1:, 1] != digests[:-1, 1])
    heads = digests[change]
    return {head.tobytes() for head in (heads if len(heads) < 64 else np.unique(heads, axis=0))}


def build(
    chunks: Chunks,
    pick: Pick,
    found: Survey,
    plan: LoadPlan,
    handles: Mapping[bytes, int],
    memory: memoryview,
) -> Prebuilder:
    """The second pass: fills `memory`, all zeros and as long as the plan needs; `finish` is the caller's. O(n log n).

    Where there are more blocks than rows those that were used last come in.
    """
    if set(found.digests) - set(handles) or set(found.used) - {slab.slab for slab in plan.slabs}:
        pick = replace(
            pick,
            slots={slab.slab: (slab.slots, pick.slots[slab.slab][1]) for slab in plan.slabs},
            refused=np.frombuffer(
                b"".join(digest for digest in found.digests if digest not in handles), dtype="<u8"
            ).reshape(-1, 2),
        )
        found = survey(chunks, pick)
    places = _places(found.touches, plan.rows)
    slabs = {slab.slab: slab for slab in plan.slabs}
    builder = Prebuilder(memory, plan)
    at = 0
    for chunk in chunks():
        wanted = pick.wanted(chunk)
        count = len(wanted.slots)
        if not count:
            continue
        positions = places[at : at + count] if places is not None else np.arange(at, at + count)
        at += count
        if (positions < 0).any():
            wanted, positions = _those(wanted, positions >= 0), positions[positions >= 0]
        blocks = Blocks(
            hashes=wanted.hashes,
            parents=wanted.parents,
            namespaces=_namespaces(wanted.digests, handles),
            depths=wanted.depths,
            touches=wanted.touches,
            slots=wanted.slots,
            generations=wanted.generations,
        )
        builder.fill(positions, blocks, slabs[chunk.slab])
    return builder


def _places(touches: U64, rows: int) -> NDArray[np.int64] | None:
    """[n] position of each block, -1 where it stays out; None: each is where the pass finds it.

    Chains lie together and from the root on: rows that are contiguous are what makes a match cheap.
    """
    keys = touches ^ _DEPTH_BITS
    if len(touches) <= rows and (keys[1:] >= keys[:-1]).all():
        return None
    places = np.full(len(touches), -1, dtype=np.int64)
    if not rows:
        return places
    if len(touches) <= rows:
        chosen = np.arange(len(touches))
    else:
        chosen = np.sort(np.argpartition(touches, len(touches) - rows)[len(touches) - rows :])
    places[chosen[np.argsort(keys[chosen], kind="stable")]] = np.arange(len(chosen))
    return places


def _namespaces(digests: U64, handles: Mapping[bytes, int]) -> U32:
    """[n] the daemon's number of each block's namespace."""
    if not len(digests):
        return np.empty(0, dtype=np.uint32)
    first = digests[0]
    if ((digests[:, 0] == first[0]) & (digests[:, 1] == first[1])).all():
        return np.full(len(digests), handles[first.tobytes()], dtype=np.uint32)
    different, which = np.unique(digests, axis=0, return_inverse=True)
    numbers = np.array([handles[digest.tobytes()] for digest in different], dtype=np.uint32)
    return numbers[which.reshape(-1)]
