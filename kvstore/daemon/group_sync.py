"""When a write counts: the decisions of a path's group sync, without its socket and its loop.

With Durability.POWER a write that the mover has answered counts once a sync that was sent after its answer has gone
well; one sync is out at a time, and covers all that were answered before it. Otherwise it counts at once, and a
flush asks for a sync of its own. A kernel says once that it could not write a page, and takes it for written from
then on: no later sync makes certain what may have been in its cache when one failed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.moves import U8, U64, MoveStatus

__all__ = ["Counted", "GroupSync"]

_NONE: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Moves whose outcome the store is to be told now, [n] each."""

    ids: U64
    statuses: U8


class GroupSync:
    """The syncs of one path. Ids of moves only grow."""

    __slots__ = ("_answered", "_doubted_to", "_last_id", "_syncing", "_waits", "doubt")

    def __init__(self, durability: Durability) -> None:
        self._waits = durability is Durability.POWER
        self._answered: list[U64] = []  # writes that the next sync is for
        self._syncing: list[U64] = []  # writes that the sync under way covers
        self._doubted_to = 0  # writes up to this id may have been in the cache when a sync failed
        self._last_id = 0
        self.doubt = ""
        """Why some of what counts may not be on the medium, though later syncs went well; empty where all is."""

    @property
    def idle(self) -> bool:
        """Whether no write waits for a sync."""
        return not (self._answered or self._syncing)

    def answered(self, ids: U64, statuses: U8, is_write: NDArray[np.bool_]) -> Counted:
        """The mover has answered moves, [n] each; those that count, or have failed, come back."""
        if not self._waits:
            return Counted(ids=ids, statuses=statuses)
        waits = is_write & (statuses == MoveStatus.OK)
        doubted = waits & (ids <= np.uint64(self._doubted_to))
        statuses = np.where(doubted, np.uint8(MoveStatus.NOT_SYNCED), statuses)
        waits &= ~doubted
        if waits.any():
            self._answered.append(ids[waits])
        return Counted(ids=ids[~waits], statuses=statuses[~waits])

    def next_sync(self) -> int | None:
        """Id of the sync to send now; None while one is under way, or where none is needed."""
        if not self._answered or self._syncing:
            return None
        self._syncing, self._answered = self._answered, []
        return self.new_id()

    def new_id(self) -> int:
        """Id of a sync that a flush sends."""
        self._last_id += 1
        return self._last_id

    def went_well(self) -> Counted:
        """The sync of the group has: what it covers counts."""
        ids, self._syncing = self._syncing, []
        return _all(ids, MoveStatus.OK)

    def failed(self, text: str, newest: int) -> Counted:
        """A sync has failed: what it covers does not count, nor does any write that has not been synced yet.

        `newest`: the last of the moves that the mover still has.
        """
        if not self._waits:
            self.doubt = f"{text}, so what was written until then may not survive a power cut"
            return _all([], MoveStatus.OK)
        ids = [*self._syncing, *self._answered]
        self._syncing, self._answered, self._doubted_to = [], [], newest
        return _all(ids, MoveStatus.NOT_SYNCED)

    def lost(self) -> None:
        """The mover is gone: the store is told of all that it had in another way."""
        self._answered, self._syncing = [], []


def _all(ids: list[U64], status: MoveStatus) -> Counted:
    joined = np.concatenate(ids) if ids else _NONE
    return Counted(ids=joined, statuses=np.full(len(joined), status, dtype=np.uint8))
