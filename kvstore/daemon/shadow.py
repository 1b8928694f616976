"""What other sizes of DRAM would hit, from a sample of the live traffic: the curve that `kvstore status` shows.

A shadow holds no block, only when each of a sample of them was used last, and of which size it is. The blocks used
since then, scaled by the rate, are its distance: DRAM of so many bytes, evicting tail-first by LRU, would have it
(SHARDS: Waldspurger and others, FAST '15). The rate falls until four times the DRAM fits into a bounded number of
sampled blocks.

Owner loop only. Noting a request is one vector operation; the rest is done between requests, and costs microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import U64

__all__ = ["CurvePoint", "Shadow"]

I64 = NDArray[np.int64]

_SCALES = (0.5, 1.0, 2.0, 4.0)
"""Of the DRAM there is."""
_SIZES = np.array(_SCALES)
_SAMPLED = 4096
_FIRST_RATE_BITS = 3  # of 8 blocks one; every bit more halves it
_HALVED_AT = 1 << 18
"""Sampled uses after which all counts are halved: the curve follows the traffic."""
_MIX = np.uint64(
    0x9E3779B97F4A7C15
)  # hashes are uniform already; this only keeps the sample apart from the index
_PENDING = 4096
_AT_A_TIME = 16  # prompts, some 50 µs each: no call waits for more


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A size of DRAM and what it would hit, 0 to 1, of all blocks that were asked for."""

    dram_bytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    names: U64  # sampled blocks of a prompt, its head first
    slot_bytes: int
    blocks: int  # of the whole prompt


class Shadow:
    """See the module."""

    __slots__ = (
        "_bytes",
        "_count",
        "_hits",
        "_last",
        "_names",
        "_pending",
        "_places",
        "_rate_bits",
        "_turn",
        "_uses",
        "dram_bytes",
    )

    def __init__(self, dram_bytes: int) -> None:
        self.dram_bytes = dram_bytes
        self._rate_bits = _FIRST_RATE_BITS
        self._places: dict[int, int] = {}
        self._names = np.zeros(_SAMPLED, dtype=np.uint64)
        self._last: I64 = np.zeros(_SAMPLED, dtype=np.int64)  # turn of the last use; 0: the place is free
        self._bytes: I64 = np.zeros(_SAMPLED, dtype=np.int64)
        self._turn = 0
        self._pending: deque[_Noted] = deque(maxlen=_PENDING)
        self._hits = np.zeros(len(_SCALES))
        self._uses = 0.0  # of all blocks
        self._count = 0.0  # of sampled ones, scaled up

    def resize(self, dram_bytes: int) -> None:
        """DRAM has another size now: the curve begins anew, with the sample that there is."""
        if dram_bytes != self.dram_bytes:
            self.dram_bytes = dram_bytes
            self._hits[:] = 0.0
            self._uses = self._count = 0.0

    def note(self, hashes: U64, slot_bytes: int) -> None:
        """A prompt was asked for: [n, 2] hashes of its blocks, in slots of `slot_bytes`."""
        if len(hashes) and self.dram_bytes:
            names = hashes[:, 0]
            self._pending.append(
                _Noted(names=names[self._sampled(names)], slot_bytes=slot_bytes, blocks=len(hashes))
            )

    def work(self) -> None:
        """Enters some of what was noted."""
        for _ in range(min(len(self._pending), _AT_A_TIME)):
            noted = self._pending.popleft()
            self._uses += noted.blocks
            # The rate may have fallen since it was noted.
            names = noted.names[self._sampled(noted.names)]
            if len(names):
                self._enter(names, noted.slot_bytes)
        if self._count > _HALVED_AT << self._rate_bits:
            self._hits /= 2
            self._uses /= 2
            self._count /= 2

    def curve(self) -> Sequence[CurvePoint]:
        """Hit rates by size, ascending; none before anything was asked for."""
        if not self._uses:
            return ()
        # What the sample has too few or too many of is put where distances are smallest (SHARDS-adj).
        missed = self._uses - self._count
        rates = np.clip((self._hits + missed) / self._uses, 0.0, 1.0)
        rates = np.where(self._hits > 0, rates, 0.0)
        return [
            CurvePoint(dram_bytes=int(scale * self.dram_bytes), hit_rate=float(rate))
            for scale, rate in zip(_SCALES, np.maximum.accumulate(rates), strict=True)
        ]

    # -- parts

    def _sampled(self, names: U64) -> NDArray[np.bool_]:
        sampled: NDArray[np.bool_] = ((names * _MIX) >> np.uint64(64 - self._rate_bits)) == 0
        return sampled

    def _enter(self, names: U64, slot_bytes: int) -> None:
        weight = 1 << self._rate_bits
        listed = names.tolist()
        places = np.array([self._places.get(name, -1) for name in listed], dtype=np.int64)
        known = places >= 0
        if known.any():
            self._count_hits(places[known], weight)
        self._count += weight * len(listed)
        self._turn += 1
        self._last[places[known]] = self._turn
        self._bytes[places[known]] = slot_bytes
        if not known.all():
            new = [name for name, old in zip(listed, known.tolist(), strict=True) if not old]
            self._insert(list(dict.fromkeys(new)), slot_bytes)

    def _count_hits(self, places: I64, weight: int) -> None:
        """Adds to the hits of each size. Blocks of a prompt that were last used together are counted head first."""
        used = self._last[places]
        for turn in np.unique(used).tolist():
            mine = places[used == turn]
            later = int(self._bytes[self._last > turn].sum())
            distances = weight * (later + np.cumsum(self._bytes[mine]))  # ascending
            self._hits += weight * np.searchsorted(distances, self.dram_bytes * _SIZES, side="right")

    def _insert(self, names: list[int], slot_bytes: int) -> None:
        while (over := len(self._places) + len(names) - _SAMPLED) > 0 and not self._drop_oldest(over):
            self._lower_rate()
            listed = np.array(names, dtype=np.uint64)
            names = listed[self._sampled(listed)].tolist()
        places = np.flatnonzero(self._last == 0)[: len(names)]
        self._names[places] = names
        self._last[places] = self._turn
        self._bytes[places] = slot_bytes
        self._places.update(zip(names, places.tolist(), strict=True))

    def _drop_oldest(self, count: int) -> bool:
        """Forgets blocks that the largest size would not have either; False where fewer than `count` are such."""
        order = np.argsort(-self._last, kind="stable")
        distances = np.cumsum(self._bytes[order]) << self._rate_bits
        beyond = order[(distances > _SCALES[-1] * self.dram_bytes) & (self._last[order] > 0)]
        self._forget(beyond)
        return len(beyond) >= count

    def _lower_rate(self) -> None:
        self._rate_bits += 1
        used = np.flatnonzero(self._last > 0)
        self._forget(used[~self._sampled(self._names[used])])

    def _forget(self, places: I64) -> None:
        for name in self._names[places].tolist():
            del self._places[name]
        self._last[places] = 0
        self._bytes[places] = 0
