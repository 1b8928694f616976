"""Loads a cached prefix from its end while the engine computes it from its beginning: the I/O around `Meeting`.

A piece is asked for by a lease of its own, waits for the disk like any other acquire, is copied into HBM, and is then
handed over: its slots take the places of private ones in the request's table, as far as nothing was computed there.
One engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copier import Copier
from engine_adapter.load_choice import LoadChoice
from engine_adapter.loads import Load
from kvstore.client import Namespace, PendingGrant, Session, SlotRun
from kvstore.layout import Tier
from kvstore.meeting import Meeting, Piece
from kvstore.moves import Grant, Outcome

__all__ = ["BothEnds", "LoadedPiece"]

_LOOK_AGAIN_S = 1.0
"""A piece that waits is asked for again after so long, should a word of it have been lost."""


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


@dataclass(slots=True)
class _Asked:
    """A piece that is not loaded yet: asked, waiting for the disk (no grant), or being copied."""

    piece: Piece
    lease: int
    asked_at: float
    nbytes: int  # what the disk had to read when it was asked, this piece included
    again_at: float = 0.0
    grant: PendingGrant | None = None
    slots: NDArray[np.uint32] | None = None  # once granted
    load: Load | None = None


class BothEnds:
    """Of one request."""

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
    ) -> None:
        """`hashes`: the cached prefix, of which blocks [begin, …) are computed or loaded."""
        self._session = session
        self._copier = copier
        self._namespace = namespace
        self._choice = choice
        self._hashes = hashes
        self._leases = leases
        self._clock = clock
        pieces = choice.cut(len(hashes) - begin, begin * namespace.block_tokens)
        self.meeting = Meeting(begin=begin, end=len(hashes), pieces=pieces)
        self._asked: list[_Asked] = []

    def poll(self, tokens: int) -> list[LoadedPiece]:
        """Goes on with whatever can go on; the pieces that were loaded since the last call.

        `tokens`: so many are computed, or are by steps that are under way; nothing is loaded in their place any more.
        """
        now, meeting = self._clock(), self.meeting
        meeting.advance(-(-tokens // self._namespace.block_tokens))
        done: list[LoadedPiece] = []
        for asked in tuple(self._asked):
            if meeting.unneeded(asked.piece):
                self._drop(asked)
            elif asked.slots is not None:
                self._finish(asked, now, done)
            elif asked.grant is not None:
                self._take_answer(asked, now, done)
            elif now >= asked.again_at:
                self._ask(asked)
        meeting.pieces = self._choice.cut(len(self._hashes) - meeting.begin, tokens)
        for piece in meeting.ask(now):
            self._begin(piece, now)
        return done

    def stop(self, tokens: int) -> int:
        """How far (a block) the next step should compute; the block of `tokens` itself: wait for what is loaded."""
        return self._choice.stop(self.meeting, tokens, self._clock(), self._namespace.block_tokens)

    def changed(self, lease: int) -> None:
        """The store says that something came that a piece waits for."""
        for asked in self._asked:
            if asked.lease == lease:
                asked.again_at = 0.0

    def close(self) -> None:
        """What is not loaded yet is not needed any more."""
        for asked in tuple(self._asked):
            self._drop(asked)

    # ------------------------------------------------------------ a piece

    def _begin(self, piece: Piece, now: float) -> None:
        queued = self._choice.queued_bytes()
        asked = _Asked(
            piece=piece,
            lease=next(self._leases),
            asked_at=now,
            nbytes=queued + len(piece) * self._session.hbm.slot_bytes,
        )
        self._asked.append(asked)
        self._ask(asked)

    def _ask(self, asked: _Asked) -> None:
        piece = asked.piece
        asked.grant = self._session.acquire(
            self._namespace, asked.lease, self._hashes[: piece.end], first=piece.begin
        )

    def _take_answer(self, asked: _Asked, now: float, done: list[LoadedPiece]) -> None:
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
            asked.slots = grant.hbm_slots
            asked.load = _load_of(self._session, grant)
            self._finish(asked, now, done)
            return
        comes = (grant.outcomes == Outcome.PROMOTING) | (grant.outcomes == Outcome.PENDING)
        pending.abandon()
        if comes.any() and not (grant.outcomes == Outcome.NO_SLOT).any():
            asked.again_at = now + _LOOK_AGAIN_S
        else:
            self._failed(asked)

    def _finish(self, asked: _Asked, now: float, done: list[LoadedPiece]) -> None:
        if asked.load is not None:
            asked.load.submit(self._copier)
            if not asked.load.loaded:
                return
            self._choice.loaded(Tier.NVME, asked.nbytes, asked.load.ended_at - asked.asked_at)
        assert asked.slots is not None
        self._asked.remove(asked)
        self.meeting.loaded(asked.piece, now)
        done.append(LoadedPiece(asked.piece, asked.slots))

    def _failed(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        self.meeting.failed(asked.piece)
        self._session.cancel(asked.lease)

    def _drop(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        if asked.grant is not None:
            asked.grant.abandon()
        if asked.load is not None:
            asked.load.withdraw(self._copier)
        if asked.slots is not None:
            self._session.stage(dropped_hbm=asked.slots)
        self._session.cancel(asked.lease)


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
