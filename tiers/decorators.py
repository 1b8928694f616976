"""What can be put around any StorageTier: a rate, counts, and faults made on purpose.

Each passes the contract on and adds one thing, so a tier itself has no flags. Safe for several threads, as the
contract asks. Time and sleep are arguments.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.config import NvmeThrottle
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import REPLY
from tiers.base import Moves, Replies, StorageTier

__all__ = ["FaultyStorage", "MeasuredStorage", "StorageCounts", "ThrottledStorage"]

_MAX_SLEEP_S = 1.0
_MOST_WENT = 64  # transfers whose records are kept: 64 pieces of 512 moves are 4 MiB
_GATHERED_S = 0.1  # of tokens that nobody took, at most
_ROUNDING_S = 1e-6  # the clock's, not a debt


class _Decorator:
    """Passes everything on."""

    def __init__(self, inner: StorageTier) -> None:
        self._inner = inner

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """See StorageTier."""
        self._inner.open_slab(extent, number, nbytes, slot_bytes)

    def drop_slab(self, extent: int) -> None:
        """See StorageTier."""
        self._inner.drop_slab(extent)

    def pieces(self, moves: Moves) -> Sequence[Moves]:
        """See StorageTier."""
        return self._inner.pieces(moves)

    def calls(self, moves: Moves) -> int:
        """See StorageTier."""
        return self._inner.calls(moves)

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        return self._inner.transfer(moves)

    def sync(self) -> None:
        """See StorageTier."""
        self._inner.sync()

    def close(self) -> None:
        """See StorageTier."""
        self._inner.close()


class ThrottledStorage(_Decorator):
    """Bytes and operations a second, of reads and of writes, to spare the medium or leave it to others.

    An operation is a piece: what one call of the disk moves. A caller waits before its transfer for as long as that may
    take by each bound that applies to it; bounds of reads never hold a write back, nor the other way round.
    """

    def __init__(
        self,
        inner: StorageTier,
        *,
        limits: NvmeThrottle,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._sleep = sleep
        self._bytes = {
            MoveKind.READ: _Bucket(limits.read_bytes_per_s, clock),
            MoveKind.WRITE: _Bucket(limits.write_bytes_per_s, clock),
        }
        self._operations = {
            MoveKind.READ: _Bucket(limits.read_operations_per_s, clock),
            MoveKind.WRITE: _Bucket(limits.write_operations_per_s, clock),
        }

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier; may wait."""
        for kind in MoveKind:
            of_kind = moves[moves["kind"] == kind]
            if len(of_kind):
                self._wait(self._bytes[kind], int(of_kind["length"].sum(dtype=np.uint64)))
                if self._operations[kind].bounded:
                    self._wait(self._operations[kind], self._inner.calls(of_kind))
        return self._inner.transfer(moves)

    def _wait(self, bucket: _Bucket, wanted: int) -> None:
        there_s = bucket.take(wanted)
        while (wait_s := there_s - self._clock()) > _ROUNDING_S:
            self._sleep(min(wait_s, _MAX_SLEEP_S))


class _Bucket:
    """Tokens that come at `rate` a second; a rate of 0 bounds nothing.

    What is not taken gathers for a moment only: with a second's worth, a disk that is asked now and then is not slow at
    all. Takers wait in the order in which they took.
    """

    __slots__ = ("_at", "_clock", "_lock", "_rate", "_tokens")

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = rate * _GATHERED_S
        self._at = clock()

    @property
    def bounded(self) -> bool:
        """Whether anything is ever held back."""
        return self._rate > 0

    def take(self, wanted: int) -> float:
        """Takes `wanted` tokens; when the last of them is there. A time in the past, or now: they are."""
        with self._lock:
            now = self._clock()
            if not self._rate:
                return now
            self._tokens = min(self._rate * _GATHERED_S, self._tokens + (now - self._at) * self._rate)
            self._at = now
            self._tokens -= wanted
            return now - self._tokens / self._rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCounts:
    """What went through a tier since it was made. `busy_s` is thread-seconds within calls."""

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    corrupt_blocks: int = 0
    failed_blocks: int = 0
    syncs: int = 0
    busy_s: float = 0.0


class MeasuredStorage(_Decorator):
    """Counts what went through and how long it took. Blocks and bytes are those that went through well.

    Adding up waits until somebody asks, or many transfers have come together: behind megabytes of blocks the processor
    has nothing of it in a cache, and it cost 0.09 ms a piece. Moves and replies of a transfer must stay as they are.
    """

    def __init__(self, inner: StorageTier, *, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()  # guards the next
        self._counts = StorageCounts()
        self._went: deque[tuple[Moves, Replies, float]] = deque()  # not added up yet

    def counts(self) -> StorageCounts:
        """The counts now."""
        with self._lock:
            for _ in range(len(self._went)):
                moves, replies, busy_s = self._went.popleft()
                self._counts = _sum(self._counts, _well(moves, replies), busy_s)
            return self._counts

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        begin = self._clock()
        replies = self._inner.transfer(moves)
        self._went.append((moves, replies, self._clock() - begin))
        if len(self._went) >= _MOST_WENT:
            self.counts()
        return replies

    def sync(self) -> None:
        """See StorageTier."""
        begin = self._clock()
        self._inner.sync()
        busy_s = self._clock() - begin
        with self._lock:
            old = self._counts
            self._counts = replace(old, syncs=old.syncs + 1, busy_s=old.busy_s + busy_s)


def _well(moves: Moves, replies: Replies) -> StorageCounts:
    """What one transfer adds, its time aside. Replies may come in another order than moves."""
    statuses = replies["status"].tolist()
    kinds, lengths = moves["kind"].tolist(), moves["length"].tolist()
    if any(statuses):
        good = dict(zip(replies["id"].tolist(), statuses, strict=True))
        went = [good[move] == MoveStatus.OK for move in moves["id"].tolist()]
        kinds = [kind for kind, well in zip(kinds, went, strict=True) if well]
        lengths = [length for length, well in zip(lengths, went, strict=True) if well]
    written = [length for kind, length in zip(kinds, lengths, strict=True) if kind == MoveKind.WRITE]
    return StorageCounts(
        read_blocks=len(lengths) - len(written),
        read_bytes=sum(lengths) - sum(written),
        written_blocks=len(written),
        written_bytes=sum(written),
        corrupt_blocks=statuses.count(MoveStatus.CORRUPT),
        failed_blocks=statuses.count(MoveStatus.IO_ERROR),
    )


def _sum(one: StorageCounts, other: StorageCounts, busy_s: float) -> StorageCounts:
    return StorageCounts(
        read_blocks=one.read_blocks + other.read_blocks,
        read_bytes=one.read_bytes + other.read_bytes,
        written_blocks=one.written_blocks + other.written_blocks,
        written_bytes=one.written_bytes + other.written_bytes,
        corrupt_blocks=one.corrupt_blocks + other.corrupt_blocks,
        failed_blocks=one.failed_blocks + other.failed_blocks,
        syncs=one.syncs,
        busy_s=one.busy_s + busy_s,
    )


class FaultyStorage(_Decorator):
    """Fails moves on purpose. `decide` gives the MoveStatus of each move: OK goes to the tier, the rest do not.

    `before_sync` runs before each sync and may raise OSError. Both may sleep, to be a slow disk.
    """

    def __init__(
        self,
        inner: StorageTier,
        *,
        decide: Callable[[Moves], NDArray[np.uint32]],
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner)
        self._decide = decide
        self._before_sync = before_sync

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        decided = self._decide(moves)
        failed = decided != MoveStatus.OK
        replies = np.zeros(int(failed.sum()), dtype=REPLY)
        replies["id"] = moves["id"][failed]
        replies["status"] = decided[failed]
        return np.concatenate((replies, self._inner.transfer(moves[~failed])))

    def sync(self) -> None:
        """See StorageTier."""
        self._before_sync()
        self._inner.sync()
