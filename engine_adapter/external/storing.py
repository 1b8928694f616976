"""Stores of the scheduling half: from full blocks of confirmed tokens to jobs for the ranks, and to seals.

A block is stored into a DRAM slot in hand and sealed once every rank has copied its part; until then nobody can hit
it. A block that is cached already, or that another request of this engine is storing, is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.jobs import CopyJob
from engine_adapter.external.request import BlockIds, LiveRequest, page_table
from kvstore.client import Namespace, Session, SlotRun
from kvstore.wire.packed import SEAL

__all__ = ["Stored", "Storing"]

_NO_SEALS: NDArray[np.void] = np.empty(0, dtype=SEAL)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A store under way."""

    namespace: Namespace
    begin: int
    hashes: NDArray[np.uint64]  # [n, 2]
    parent: NDArray[np.uint64]  # [2] of the first; zeros at the root
    run: SlotRun
    event: object | None

    def seals(self) -> NDArray[np.void]:
        """SEAL[n]."""
        seals = np.zeros(len(self.run), dtype=SEAL)
        seals["slot"], seals["generation"] = self.run.slots, self.run.generations
        seals["namespace"] = self.namespace.handle
        seals["depth"] = np.arange(self.begin, self.begin + len(self.run), dtype=np.uint32)
        seals["hash"] = self.hashes
        seals["parent"][0] = self.parent
        seals["parent"][1:] = self.hashes[:-1]
        return seals


class Storing:
    """Stores that no rank, or not every rank, has ended."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self.under_way: dict[int, Stored] = {}
        self._hashes: set[bytes] = set()  # of blocks that are being stored
        self.no_room_blocks = 0
        self.stored_blocks = 0

    def __contains__(self, number: int) -> bool:
        return number in self.under_way

    def job(self, session: Session, request: LiveRequest, full: int, block_ids: BlockIds) -> CopyJob | None:
        """Stores as many of the leading `full` blocks as need it and have room; None: none now."""
        assert request.chain is not None
        assert request.namespace is not None
        self._pass_over(session, request, full)
        begin = request.stored_blocks
        pages = page_table(block_ids, begin, full)
        whole = (pages != 0).all(axis=1)
        count = len(whole) if whole.all() else int(whole.argmin())
        if count < len(whole):  # a group has let go of its page: nothing behind it can be reached
            request.stored_blocks = full
        room = session.take_room(min(count, session.room_in_hand)) if count else None
        if room is None or not len(room):
            self.no_room_blocks += count
            return None
        end = begin + len(room)
        self.no_room_blocks += begin + count - end
        request.stored_blocks = max(request.stored_blocks, end)
        number = next(self._numbers)
        hashes = request.chain.hashes
        stored = Stored(
            namespace=request.namespace,
            begin=begin,
            hashes=hashes[begin:end],
            parent=hashes[begin - 1] if begin else np.zeros(2, dtype=np.uint64),
            run=room,
            event=None if request.facts.describe is None else request.facts.describe(begin, end),
        )
        self.under_way[number] = stored
        self._hashes.update(block.tobytes() for block in stored.hashes)
        request.stores.add(number)
        return CopyJob(
            number=number,
            request=request.facts.id,
            pages=pages[: len(room)],
            slots=room.slots,
            generations=room.generations,
        )

    def ended(self, session: Session, number: int, *, failed: bool) -> Stored:
        """Every rank has ended it: seals it, or gives its slots back."""
        stored = self.under_way.pop(number)
        self._hashes.difference_update(block.tobytes() for block in stored.hashes)
        session.stage(seals=_NO_SEALS if failed else stored.seals(), dropped_dram=stored.run.slots)
        self.stored_blocks += 0 if failed else len(stored.run)
        return stored

    def _pass_over(self, session: Session, request: LiveRequest, full: int) -> None:
        """Blocks that are cached, whether or not they may be read, or are being stored by another request."""
        assert request.chain is not None
        assert request.namespace is not None
        hashes = request.chain.hashes
        request.stored_blocks += session.match_all(
            request.namespace, hashes[request.stored_blocks : full]
        ).hits
        while request.stored_blocks < full and hashes[request.stored_blocks].tobytes() in self._hashes:
            request.stored_blocks += 1
