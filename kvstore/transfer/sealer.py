"""Puts blocks into a service's DRAM and seals them, through lost streams and restarts of the daemon.

A batch counts only when every seal of it was answered; what a lost session took with it is done again. Blocks: called
in a thread, one call at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lost, Namespace, SealResult, Session, SlotRun
from kvstore.errors import NotFound, Unavailable
from kvstore.moves import SealOutcome
from kvstore.transfer.archive import BlockHead
from kvstore.wire.packed import SEAL

__all__ = ["Sealer"]

Blocks = Sequence[tuple[BlockHead, memoryview]]
_PATIENCE_S = 60.0
_POLL_S = 0.05


class Sealer:
    """Of one session without HBM and one namespace."""

    def __init__(self, session: Session, namespace: Namespace) -> None:
        self._session = session
        self._namespace = namespace

    def seal(self, blocks: Blocks) -> int:
        """Stores blocks of the session's size; how many were new to the service. Raises Unavailable after a minute."""
        left, new = list(blocks), 0
        until_s = time.monotonic() + _PATIENCE_S
        while left:
            run = self._take_room(len(left), until_s)
            now = left[: len(run)]
            if not self._fill(run, now):
                continue
            outcomes = self._sealed(run, now, until_s)
            new += int(np.count_nonzero(outcomes == SealOutcome.PUBLISHED))
            again = [
                block for block, outcome in zip(now, outcomes, strict=True) if outcome == SealOutcome.STALE
            ]
            if len(again) < len(now):
                until_s = time.monotonic() + _PATIENCE_S
            left = again + left[len(run) :]
        return new

    def _take_room(self, wanted: int, until_s: float) -> SlotRun:
        """At least one DRAM slot to fill, at most `wanted`."""
        while True:
            run = self._session.take_room(min(wanted, max(1, self._session.room_in_hand)))
            if run is not None:
                return run
            if time.monotonic() > until_s:
                raise Unavailable(
                    "the service gives no room in DRAM: it is away, or all of DRAM is held; what came so far is stored"
                )
            self._session.step()
            self._session.wait(_POLL_S)
            self._session.poll()

    def _fill(self, run: SlotRun, blocks: Blocks) -> bool:
        """Copies payloads into the slots; False where a slot is not mapped here, and nothing is sealed."""
        try:
            for slot, (_, payload) in zip(run.slots.tolist(), blocks, strict=True):
                self._session.dram.view(slot)[:] = np.frombuffer(payload, dtype=np.uint8)
        except (NotFound, ValueError):  # the session was lost: the slots are of tables that are gone
            self._session.step(dropped_dram=run.slots)
            return False
        return True

    def _sealed(self, run: SlotRun, blocks: Blocks, until_s: float) -> NDArray[np.uint8]:
        """[n] SealOutcome of each block once all are known; STALE where the session lost its slot."""
        seals = np.zeros(len(run), dtype=SEAL)
        seals["slot"], seals["generation"] = run.slots, run.generations
        seals["namespace"] = self._namespace.handle
        seals["depth"] = [head.depth for head, _ in blocks]
        for name in ("hash", "parent"):
            packed = b"".join(getattr(head, name) for head, _ in blocks)
            seals[name] = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
        self._session.step(seals=seals)
        outcomes = np.full(len(run), SealOutcome.STALE, dtype=np.uint8)
        waiting = np.ones(len(run), dtype=np.bool_)
        try:
            self._await(run, outcomes, waiting, until_s)
        finally:  # until here they are in use, so that a session which is lost says so
            self._session.step(dropped_dram=run.slots)
        return outcomes

    def _await(
        self, run: SlotRun, outcomes: NDArray[np.uint8], waiting: NDArray[np.bool_], until_s: float
    ) -> None:
        while waiting.any():
            for event in self._session.poll():
                if isinstance(event, SealResult):
                    _note(event, run, outcomes, waiting)
                elif isinstance(event, Lost):
                    waiting &= ~np.isin(run.slots, event.dram_slots)
            if waiting.any() and not self._session.wait(_POLL_S) and time.monotonic() > until_s:
                raise Unavailable("the service does not answer; what came so far is stored")


def _note(result: SealResult, run: SlotRun, outcomes: NDArray[np.uint8], waiting: NDArray[np.bool_]) -> None:
    """Enters what became of the seals of this run."""
    slots = {slot: at for at, slot in enumerate(run.slots.tolist())}
    for slot, generation, outcome in zip(
        result.seals["slot"].tolist(),
        result.seals["generation"].tolist(),
        result.outcomes.tolist(),
        strict=True,
    ):
        at = slots.get(slot)
        if at is not None and int(run.generations[at]) == generation and waiting[at]:
            outcomes[at] = outcome
            waiting[at] = False
