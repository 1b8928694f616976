"""Moves between DRAM and storage: what movers are told to do, and what became of it.

Puts promotions, write-behind and the table of flights together. One mover serves one path.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FailedPrecondition
from kvstore.layout import NONE, SlotState, Tier
from kvstore.moves import U8, U64, FlushLeft, FlushMark, MoveKind, MoveStatus
from kvstore.recorder import Event
from kvstore.state import StoreState, mover_bit
from kvstore.tiering.admission import WriteBudget
from kvstore.tiering.flights import Flights
from kvstore.tiering.promoting import Promoting
from kvstore.tiering.writing import Writing
from kvstore.trust.watching import Watching
from kvstore.victims.evicting import Evictor
from kvstore.wire.packed import MOVE

__all__ = ["ALL", "Moving"]

ALL = 1 << 30
"""Moves: no bound."""


class Moving:
    """All moves of all paths."""

    __slots__ = ("_flights", "_state", "_writing", "promoting", "watching")

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self.promoting = Promoting(state, evictor)
        self._writing = Writing(state, evictor)
        self._flights = Flights(state)
        self.watching = Watching(state, self._flights)

    @property
    def queued_reads(self) -> int:
        """Promotions that no mover has yet."""
        return self.promoting.queued

    @property
    def queued_writes(self) -> int:
        """Blocks that wait to be written down."""
        return self._writing.queued

    @property
    def in_flight(self) -> int:
        """Moves that movers have."""
        return len(self._flights)

    def budget(self, path: int) -> WriteBudget:
        """What a path may write today."""
        return self._writing.admission.budgets[path]

    # -- writes in

    def queue_came(self) -> None:
        """Blocks that came into DRAM since the last call shall be written down."""
        came, self._state.sealed_in_dram = self._state.sealed_in_dram, []
        for rows in came:
            self._writing.came(rows, self.promoting.writable())

    def catch_up(self) -> None:
        """The background's part: what was missed is queued, and paused disks are tried."""
        self.watching.carry_out()
        self._writing.catch_up(self.promoting.writable())
        for path in range(len(self.promoting.health)):
            self.promoting.probe(path)

    def flush(self) -> FlushMark:
        """Queues all that is in DRAM and not in storage."""
        rows = self._writing.unwritten()
        self._writing.begin_flush()
        self._writing.flush(rows, self.promoting.writable())
        return FlushMark(rows=rows, words=self._state.words(rows))

    def left_of(self, mark: FlushMark) -> FlushLeft:
        """What is left of a flush."""
        return self._writing.left_of(mark, self.promoting.writable())

    # -- out

    def take(self, path: int, limit: int, writes: int, early: int) -> NDArray[np.void]:
        """MOVE[] for a path's mover: promotions that somebody waits for, at most `early` prefetches, then at most
        `writes` writes; at most `limit` together. Each kind is sorted by slot."""
        state = self._state
        self.promoting.set_up(path)
        limit = 0 if state.hung[path] else min(limit, self._flights.places)
        health, now_ms = self.promoting.health[path], state.now_ms
        parts: list[NDArray[np.void]] = []
        dram = self.promoting.take(path, health.reads.allowed(limit, now_ms), early)
        if len(dram):
            health.reads.began(now_ms)
            nvme = state.columns.nvme[state.dram.row[dram]]
            parts.append(self._flights.begin(MoveKind.READ, path, dram, nvme))
        writes = health.writes.allowed(min(writes, limit - len(dram)), now_ms)
        if writes:
            for source, target in self._writing.take(path, writes):
                health.writes.began(now_ms)
                parts.append(self._flights.begin(MoveKind.WRITE, path, source, target))
        checks = self.watching.due(limit - sum(map(len, parts)))
        if len(checks):
            parts.append(self._flights.begin(MoveKind.VERIFY, path, checks, np.zeros_like(checks)))
        if not parts:
            return np.empty(0, dtype=MOVE)
        moves = np.concatenate(parts)
        first = moves[0]
        state.recorder.note(
            Event.MOVES_BEGIN,
            path,
            len(moves),
            len(dram),
            int(np.count_nonzero(moves["kind"] == MoveKind.WRITE)),
            int(first["id"]),
            first["hash"].tobytes(),
        )
        return moves

    # -- back in

    def done(self, path: int, ids: U64, statuses: U8) -> None:
        """What became of moves; ids that are not in flight on this path are passed over."""
        flights, named = self._flights.end(path, ids)
        self._end(path, flights, statuses[named])

    def mover_dead(self, path: int) -> None:
        """All that the path's mover had fails; whatever else its bit or a half-written slot kept is free again."""
        state = self._state
        state.hung[path] = False
        flights = self._flights.end_all(path)
        self._end(path, flights, np.full(len(flights), MoveStatus.CANCELLED, dtype=np.uint8))
        held = state.dram.held_by(mover_bit(path))
        promoted = state.dram.filling(held) & ~state.held_by_sessions(state.dram, held)
        self.promoting.undo(held[promoted])
        self.promoting.set_down(path)
        state.dram.unhold(held[~promoted], mover_bit(path))
        state.dram.free(held[state.dram.distrusted(held) & (state.dram.holders[held] == 0)])
        torn = np.flatnonzero((state.nvme.state & np.uint64(0xFF)) == np.uint64(SlotState.FILLING)).astype(
            np.uint32
        )
        state.nvme.free(torn[state.nvme.devices(torn) == path])

    def _end(self, path: int, flights: NDArray[np.void], statuses: U8) -> None:
        self._note_end(path, flights, statuses)
        checks = flights["kind"] == MoveKind.VERIFY
        if checks.any():  # what they found was heard before
            self.watching.ended(int(checks.sum()))
            flights, statuses = flights[~checks], statuses[~checks]
        self._finish(path, flights, statuses)

    def _note_end(self, path: int, flights: NDArray[np.void], statuses: U8) -> None:
        """One record of moves that went well, one of each other kind of end."""
        for status in np.unique(statuses).tolist():
            ended = flights[statuses == status]
            row = ended["row"][0]
            block = self._state.columns.hash[row].tobytes()
            ok = status == MoveStatus.OK
            event = Event.MOVES_END if ok else Event.MOVES_FAILED
            told = len(ended) if ok else status
            self._state.recorder.note(event, path, len(ended), told, c=int(ended["id"][0]), block=block)

    def _finish(self, path: int, flights: NDArray[np.void], statuses: U8) -> None:
        reads = flights["kind"] == MoveKind.READ
        ok, cancelled = statuses == MoveStatus.OK, statuses == MoveStatus.CANCELLED
        corrupt = reads & (statuses == MoveStatus.CORRUPT)
        bad = ~ok & ~cancelled & ~corrupt
        if bad.any():  # nothing was tried where there is no slab
            unmade = bad & self._state.unmade[self._state.nvme.extent[flights["nvme"]]]
            bad, cancelled = bad & ~unmade, cancelled | unmade
        # A disk that fails everything says nothing about its slots: neither they nor the blocks in them are given up.
        whole = self._judge(path, reads, ok | corrupt, bad) | (statuses == MoveStatus.NOT_SYNCED)
        if whole.any():
            bad, cancelled = bad & ~whole, cancelled | whole
            self._count_errors(path, int(whole.sum()))
        if (reads & ok).any():
            self.promoting.succeeded(path, flights[reads & ok])
        if corrupt.any():
            self.promoting.corrupt(flights[corrupt])
        if (reads & bad).any():
            self.promoting.failed(flights[reads & bad])
        if (reads & cancelled).any():
            self.promoting.cancelled(flights[reads & cancelled])
        if (~reads & ok).any():
            self._writing.succeeded(path, flights[~reads & ok])
        if (~reads & bad).any():
            self._writing.failed(path, flights[~reads & bad])
        if (~reads & cancelled).any():
            self._writing.cancelled(path, flights[~reads & cancelled])
        if bad.any():
            self._count_errors(path, int(bad.sum()))
        if self.promoting.health[path].reads.paused:
            self.promoting.cancel_all(path)

    def _judge(
        self, path: int, reads: NDArray[np.bool_], good: NDArray[np.bool_], bad: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """[n] Moves that failed because their disk fails everything, in this direction.

        A read that was asked for and was to tell whether the disk gives blocks again is none: with its block kept,
        one that cannot be read would be asked for, and keep the path paused, for ever.
        """
        health, now_ms = self.promoting.health[path], self._state.now_ms
        whole = np.zeros(len(bad), dtype=np.bool_)
        for streak, of_kind in ((health.reads, reads), (health.writes, ~reads)):
            tried = streak.trying and not streak.probing and streak is health.reads
            streak.ended(good=int((good & of_kind).sum()), failed=int((bad & of_kind).sum()), now_ms=now_ms)
            if streak.paused and not tried:
                whole |= bad & of_kind
        return whole

    def _count_errors(self, path: int, count: int) -> None:
        self._state.counters[f"io_errors_path_{path}"] += count
        self._state.counters["io_errors"] += count

    def leave_extent(self, extent: int) -> None:
        """No move may touch an extent that goes away. Raises: FailedPrecondition while one in flight does."""
        state = self._state
        tier = state.extents.require(extent)
        if tier is Tier.HBM:
            return
        base, size = state.extents.range(extent)
        if self._flights.touch_extent(tier.name.lower(), base, size):
            raise FailedPrecondition(f"a mover is at work in extent {extent}")
        slots = np.arange(base, base + size, dtype=np.uint32)
        if tier is Tier.DRAM:
            self.promoting.undo(slots[state.dram.filling(slots) & (state.dram.row[slots] != NONE)])
        else:
            rows = state.nvme.row[slots[state.nvme.sealed(slots)]]
            promoted = state.columns.dram[rows]
            self.promoting.undo(promoted[state.dram.filling(promoted)])
