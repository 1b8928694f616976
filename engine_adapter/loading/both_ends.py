"""Loads a cached prefix from its end while the engine computes it from its beginning: the I/O around `Meeting`.

A piece is asked for by a lease of its own, waits for the disk like any other acquire, is copied into HBM, and is then
handed over: its slots take the places of private ones in the request's table, as far as nothing was computed there. A
thread does all that, since an engine's step may be longer than a piece takes; the engine only takes what is loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier
from engine_adapter.loading.choice import LoadChoice
from engine_adapter.loading.load import Load
from kvstore.client import Namespace, PendingGrant, Session, SlotRun
from kvstore.layout import Tier
from kvstore.moves import Grant, Outcome
from kvstore.planning.meeting import Meeting, Piece

__all__ = ["BothEnds", "LoadedPiece", "PieceLoader", "Taken"]

_POLL_S = 0.002
"""How often the thread looks after pieces while there are any."""
_AGAIN_S = 0.5
"""A piece that does not come into memory is asked for again after so long: it may never come."""
_ROOM_S = 0.02
"""As long, where DRAM or HBM had no room for all of it."""


@dataclass(frozen=True, slots=True)
class LoadedPiece:
    """Blocks in HBM slots, each with a reference that is the receiver's."""

    piece: Piece
    slots: NDArray[np.uint32]

    def into(self, table: NDArray[np.uint32], computed: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The block table with these in the places of slots in which nothing is computed, and slots of no more use.

        `computed`: blocks of the table that are computed, or by steps that are under way; they stay.
        """
        begin, end = self.piece.begin, self.piece.end
        first = min(max(begin, computed), end)
        unused = np.concatenate([table[first:end], self.slots[: first - begin]])
        return np.concatenate([table[:first], self.slots[first - begin :], table[end:]]), unused


@dataclass(frozen=True, slots=True)
class Taken:
    """Pieces, and the first run of blocks that were taken by now and are not computed, as `Meeting.next_loaded`."""

    pieces: list[LoadedPiece]
    run: Piece


@dataclass(slots=True)
class _Asked:
    """A piece that is not loaded yet: asked, waiting for the disk (no grant), or being copied."""

    piece: Piece
    lease: int
    asked_at: float
    nbytes: (
        int  # what the disk had to read when it was asked, this piece included; 0: says nothing of the disk
    )
    own_bytes: int = 0  # of that, what is its own
    again_at: float = 0.0
    lacks_slots: bool = False  # it waits for slots, whatever the disk does
    grant: PendingGrant | None = None
    slots: NDArray[np.uint32] | None = None  # once granted
    load: Load | None = None


class BothEnds:
    """Of one request. `work` is the loader's thread's, all else the engine's."""

    def __init__(
        self,
        session: Session,
        copier: Copier,
        namespace: Namespace,
        choice: LoadChoice,
        hashes: NDArray[np.uint64],
        begin: int,
        leases: Iterator[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        waits: bool = True,
    ) -> None:
        """`hashes`: the cached prefix, of which blocks [begin, …) are computed or loaded.

        `waits`: whether the computation may wait for a load that is expected sooner. Where it may not, loads are to
        show how fast a disk is: what was asked for is let come, though it be computed by then.
        """
        self._session = session
        self._copier = copier
        self._namespace = namespace
        self._choice = choice
        self._hashes = hashes
        self._leases = leases
        self._clock = clock
        self._waits = waits
        self._lock = threading.Lock()
        self._meeting = Meeting(begin=begin, end=len(hashes), piece=choice.piece_blocks(len(hashes) - begin))
        self._asked: list[_Asked] = []
        self._done: list[LoadedPiece] = []
        self._closed = False
        self.begin, self.end = begin, len(hashes)

    # ------------------------------------------------------------ the engine

    def take(self, tokens: int) -> Taken:
        """The pieces that were loaded since the last call.

        `tokens`: so many are computed, or are by steps that are under way; nothing is loaded in their place any more.
        """
        with self._lock:
            self._meeting.advance(-(-tokens // self._namespace.block_tokens))
            done, self._done = self._done, []
            if done:  # pages come back in exchange
                for asked in self._asked:
                    asked.again_at = 0.0 if asked.lacks_slots else asked.again_at
            return Taken(done, self._meeting.next_loaded)

    def stop(self, tokens: int) -> int:
        """How far (a block) the next step should compute; the block of `tokens` itself: wait for what is loaded.

        Never beyond what is loaded, taken or not.
        """
        with self._lock:
            now, block_tokens = self._clock(), self._namespace.block_tokens
            return self._choice.stop(self._meeting, tokens, now, block_tokens, waits=self._waits)

    def close(self) -> None:
        """What is not loaded yet is not needed any more."""
        with self._lock:
            self._closed = True
            for asked in tuple(self._asked):
                self._drop(asked)
            for loaded in self._done:
                self._session.stage(dropped_hbm=loaded.slots)
            self._done.clear()

    # ------------------------------------------------------------ the thread

    def work(self) -> bool:
        """Goes on with whatever can go on. False: nothing is left to do."""
        with self._lock:
            if self._closed:
                return False
            now, meeting = self._clock(), self._meeting
            for asked in tuple(self._asked):
                if meeting.unneeded(asked.piece) and self._is_over(asked, now):
                    self._drop(asked)
                elif asked.slots is not None:
                    self._finish(asked, now)
                elif asked.grant is not None:
                    self._take_answer(asked, now)
                elif now >= asked.again_at or (not asked.lacks_slots and self._in_memory(asked.piece)):
                    self._ask(asked)
            for piece in meeting.ask(now):
                self._begin(piece, now)
            return bool(self._asked)

    def _begin(self, piece: Piece, now: float) -> None:
        slot_bytes = self._session.hbm.slot_bytes
        queued = max(self._choice.queued_bytes(), sum(asked.own_bytes for asked in self._asked))
        own = int(np.count_nonzero(self._tiers(piece) == Tier.NVME)) * slot_bytes
        asked = _Asked(
            piece=piece,
            lease=next(self._leases),
            asked_at=now,
            nbytes=queued + own if own else 0,
            own_bytes=own,
        )
        self._asked.append(asked)
        self._ask(asked)

    def _is_over(self, asked: _Asked, now: float) -> bool:
        """Whether a piece that is computed by now is let go of: where it tries the disk, once all of it is in memory.

        Then that is measured. One that lacks slots, or that this engine has published meanwhile, says nothing.
        """
        if self._waits or asked.lacks_slots:
            return True
        if asked.slots is None and not self._in_memory(asked.piece):
            return False
        if asked.nbytes and (asked.slots is not None or (self._tiers(asked.piece) == Tier.DRAM).all()):
            self._choice.loaded_beside(asked.nbytes, now - asked.asked_at)
        asked.nbytes = 0
        return True

    def _ask(self, asked: _Asked) -> None:
        piece = asked.piece
        asked.grant = self._session.acquire(
            self._namespace, asked.lease, self._hashes[: piece.end], first=piece.begin
        )

    def _in_memory(self, piece: Piece) -> bool:
        """Whether all of it is, by the shared tables: sooner known than told."""
        tiers = self._tiers(piece)
        return len(tiers) == len(piece) and not (tiers == Tier.NVME).any()

    def _tiers(self, piece: Piece) -> NDArray[np.uint8]:
        """Of its leading blocks that are cached."""
        return self._session.match(self._namespace, self._hashes[piece.begin : piece.end]).tiers

    def _take_answer(self, asked: _Asked, now: float) -> None:
        pending = asked.grant
        assert pending is not None
        if not pending.done():
            return
        asked.grant = None
        if pending.error is not None:
            self._failed(asked)
            return
        grant = pending.result(0)
        if ((grant.outcomes == Outcome.HIT_HBM) | (grant.outcomes == Outcome.HIT_DRAM)).all():
            asked.slots, asked.load = grant.hbm_slots, _load_of(self._session, grant)
            self._finish(asked, now)
            return
        pending.abandon()
        asked.lacks_slots = bool((grant.outcomes == Outcome.NO_SLOT).any())
        if asked.lacks_slots:  # until a piece before it has taken the places of pages that the request has
            asked.nbytes, asked.again_at = 0, now + _ROOM_S
        elif ((grant.outcomes == Outcome.PROMOTING) | (grant.outcomes == Outcome.PENDING)).any():
            # Some may not be read yet: there was no room in DRAM.
            some = bool((grant.outcomes == Outcome.LATER).any())
            asked.nbytes = 0 if some else asked.nbytes  # it waits for room, whatever the disk does
            asked.again_at = now + (_ROOM_S if some else _AGAIN_S)
        else:
            self._failed(asked)

    def _finish(self, asked: _Asked, now: float) -> None:
        assert asked.slots is not None
        if asked.load is not None:
            asked.load.submit(self._copier)
            if asked.load.failed:
                self._failed(asked)
                return
            if not asked.load.loaded:
                return
            if asked.load.wrong:
                self._session.stage(dropped_hbm=asked.slots)
                self._failed(asked)
                return
            if asked.nbytes:
                self._choice.loaded_beside(asked.nbytes, asked.load.ended_at - asked.asked_at)
            self._meeting.piece = self._choice.piece_blocks(self.end - self.begin)
        self._asked.remove(asked)
        self._meeting.loaded(asked.piece, now)
        self._done.append(LoadedPiece(asked.piece, asked.slots))
        self._session.notify()

    def _failed(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        self._meeting.failed(asked.piece)
        self._session.cancel(asked.lease)

    def _drop(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        if asked.nbytes and asked.slots is None:
            self._choice.not_loaded_beside(asked.nbytes, self._clock() - asked.asked_at)
        if asked.grant is not None:
            asked.grant.abandon()
        if asked.load is not None:
            asked.load.withdraw(self._copier)
        if asked.slots is not None:
            self._session.stage(dropped_hbm=asked.slots)
        self._session.cancel(asked.lease)


class PieceLoader:
    """The thread that looks after all requests of an engine that are loaded from behind; it ends with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[BothEnds] = []
        self._running = False

    def add(self, both: BothEnds) -> None:
        """From now on the thread works for it, until it has nothing left to do."""
        both.work()  # the disk begins at once
        with self._lock:
            self._all.append(both)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="kvstore-pieces", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                everyone = tuple(self._all)
            idle = [both for both in everyone if not both.work()]
            with self._lock:
                self._all = [both for both in self._all if both not in idle]
                if not self._all:
                    self._running = False
                    return
            time.sleep(_POLL_S)


def _load_of(session: Session, grant: Grant) -> Load | None:
    """What has to be copied from DRAM; None where HBM has all of it."""
    at = grant.outcomes == Outcome.HIT_DRAM
    if not at.any():
        return None
    return Load(
        session,
        SlotRun(slots=grant.dram_slots[at], generations=grant.dram_generations[at]),
        SlotRun(slots=grant.hbm_slots[at], generations=grant.hbm_generations[at]),
    )
