"""A trace as arrays: a packed stream of requests, each a chain of block ids and a few attributes.

A block id is dense (0 to unique - 1, in order of first appearance) and names the block *with its whole prefix*, so
equal ids are KV that can be used again, and wherever a block appears all blocks before it appear as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from eviction.base import Stop
from kvstore.errors import InvalidArgument

__all__ = ["Pacing", "Trace", "TraceBuilder", "Turn"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Pacing(StrEnum):
    """What `time_ms` counts from."""

    TRACE = "trace"  # the start of the trace: requests come when they came
    SESSION = "session"  # the start of the request's session: `users.play` makes a load of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """See the module. Arrays of requests are [n] in the order in which they come; nothing changes them."""

    name: str
    block_tokens: int
    pacing: Pacing
    time_ms: I64
    offsets: I64  # [n + 1] of each request's chain in `blocks`
    blocks: I32
    prompt_tokens: I32
    output_tokens: I32
    session: I32
    turn: I32  # 0 is the first request of its session
    stop: U8  # eviction.base.Stop
    unique_blocks: int
    ids_known: bool = True
    """False: it has lengths alone, so that which blocks are equal, and with it every hit rate, cannot be known."""

    def __len__(self) -> int:
        return len(self.time_ms)

    def chain(self, request: int) -> I32:
        """Blocks of a request's prompt, a view."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def coarsened(self, block_tokens: int) -> Trace:
        """With blocks of a multiple of the tokens: of every so many the last, since it names all before it.

        What does not fill a larger block at a prompt's end has none. Raises: InvalidArgument.
        """
        if block_tokens == self.block_tokens:
            return self
        factor, rest = divmod(block_tokens, self.block_tokens)
        if factor < 1 or rest:
            raise InvalidArgument(
                f"{self.name}: blocks of {block_tokens} tokens are no multiple of {self.block_tokens}"
            )
        lengths = np.diff(self.offsets)
        position = np.arange(len(self.blocks)) - np.repeat(self.offsets[:-1], lengths)
        kept = self.blocks[position % factor == factor - 1]
        blocks, unique = _dense(kept)
        offsets = np.concatenate(([0], np.cumsum(lengths // factor)))
        return replace(self, block_tokens=block_tokens, offsets=offsets, blocks=blocks, unique_blocks=unique)

    def taken(self, requests: I64, time_ms: I64 | None = None) -> Trace:
        """These requests alone, in this order, with blocks named anew; `time_ms` [len(requests)] replaces theirs."""
        lengths = np.diff(self.offsets)[requests]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        blocks, unique = _dense(self.blocks[np.repeat(self.offsets[requests], lengths) + within])
        return replace(
            self,
            time_ms=self.time_ms[requests] if time_ms is None else time_ms,
            offsets=offsets,
            blocks=blocks,
            unique_blocks=unique,
            prompt_tokens=self.prompt_tokens[requests],
            output_tokens=self.output_tokens[requests],
            session=self.session[requests],
            turn=self.turn[requests],
            stop=self.stop[requests],
        )

    def paced(self, pacing: Pacing) -> Trace:
        """With times that count from something else."""
        return replace(self, pacing=pacing)

    def part(self, index: int, parts: int) -> Trace:
        """The sessions whose number leaves `index` when divided by `parts`: what is held back shares no session."""
        return self.taken(np.flatnonzero(self.session % parts == index))


def _dense(ids: NDArray[np.integer]) -> tuple[I32, int]:
    """`ids` numbered anew in order of first appearance, and how many differ. O(n) for small ids, else O(n log n)."""
    if not len(ids):
        return np.empty(0, dtype=np.int32), 0
    if ids.min() < 0 or ids.max() > 4 * len(ids) + 1024:
        ids = np.unique(ids, return_inverse=True)[1]
    first = np.full(int(ids.max()) + 1, len(ids), dtype=np.int64)
    first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1)  # the last write stands: that of the first appearance
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(first), dtype=np.int32)
    rank[order] = np.arange(len(first), dtype=np.int32)
    return rank[ids], int(np.count_nonzero(first < len(ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request as a reader finds it. `ids` are chain ids of any integers, as `Trace` means them."""

    time_ms: int
    ids: Sequence[int] | NDArray[np.integer]
    prompt_tokens: int
    output_tokens: int = 0
    session: int = 0
    stop: Stop = Stop.UNKNOWN


class TraceBuilder:
    """Packs requests, in the order in which they are added."""

    __slots__ = ("_ids", "_lengths", "_rows", "_turns")

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._ids: list[NDArray[np.integer]] = []
        self._lengths: list[int] = []
        self._turns: dict[int, int] = {}

    def add(self, turn: Turn) -> None:
        """One more request."""
        place = self._turns.get(turn.session, 0)
        self._turns[turn.session] = place + 1
        self._rows.append(
            (turn.time_ms, turn.prompt_tokens, turn.output_tokens, turn.session, place, int(turn.stop))
        )
        ids = turn.ids if isinstance(turn.ids, np.ndarray) else np.asarray(turn.ids, dtype=np.int64)
        self._ids.append(ids)
        self._lengths.append(len(turn.ids))

    def build(self, name: str, block_tokens: int, pacing: Pacing) -> Trace:
        """The trace; by time where times are of the trace. Raises: InvalidArgument when there is no request."""
        if not self._rows:
            raise InvalidArgument(f"{name}: holds no requests")
        columns = np.asarray(self._rows, dtype=np.int64).T
        blocks, unique = _dense(np.concatenate(self._ids))
        trace = Trace(
            name=name,
            block_tokens=block_tokens,
            pacing=pacing,
            time_ms=columns[0],
            offsets=np.concatenate(([0], np.cumsum(self._lengths))),
            blocks=blocks,
            prompt_tokens=columns[1].astype(np.int32),
            output_tokens=columns[2].astype(np.int32),
            session=columns[3].astype(np.int32),
            turn=columns[4].astype(np.int32),
            stop=columns[5].astype(np.uint8),
            unique_blocks=unique,
        )
        if pacing is Pacing.SESSION or (np.diff(trace.time_ms) >= 0).all():
            return trace
        return trace.taken(np.argsort(trace.time_ms, kind="stable"))
