"""What waits to be copied down, and what of it is let go where too much waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.blocks.write_through import WriteThrough
from engine_adapter.copying.copier import CopyBatch
from kvstore.client import SlotRun


class Memory:
    slot_bytes = 4096

    def address_of(self, slots: NDArray[np.uint32]) -> NDArray[np.uint64]:
        return slots.astype(np.uint64)


class FakeSession:
    """Room that the test gives, and what was let go."""

    def __init__(self, room: int = 0) -> None:
        self.hbm = self.dram = Memory()
        self.room_in_hand = room
        self.dropped: list[int] = []
        self.shared: list[int] = []

    def share_hbm(self, slots: NDArray[np.uint32]) -> None:
        self.shared += slots.tolist()

    def take_room(self, count: int) -> SlotRun | None:
        self.room_in_hand -= count
        slots = np.arange(count, dtype=np.uint32)
        return SlotRun(slots=slots, generations=slots)

    def step(self, *, dropped_hbm: NDArray[np.uint32], **_: Any) -> None:
        self.dropped += dropped_hbm.tolist()


class HeldCopier:
    """Takes every batch and completes none."""

    def __init__(self) -> None:
        self.batches: list[CopyBatch] = []

    def submit(self, batch: CopyBatch) -> bool:
        self.batches.append(batch)
        return True


def run(begin: int, end: int) -> SlotRun:
    slots = np.arange(begin, end, dtype=np.uint32)
    return SlotRun(slots=slots, generations=slots)


def rig(session: FakeSession, bound: int) -> tuple[WriteThrough, HeldCopier]:
    copier = HeldCopier()
    return WriteThrough(session, copier, max_backlog_blocks=bound), copier  # type: ignore[arg-type]


def test_only_what_is_over_the_bound_is_let_go() -> None:
    """A prompt of 4,096 blocks that was sealed at once was lost to DRAM as a whole, for the few that were too many."""
    session = FakeSession()
    down, _ = rig(session, 64)
    down.adopt(run(0, 100))
    assert sorted(session.dropped) == list(range(64, 100)), "the tail goes: the head is what others hit"
    assert down.backlog_blocks == 64
    down.adopt(run(100, 110))
    assert sorted(session.dropped) == list(range(54, 100))
    assert down.backlog_blocks == 64


def test_what_finds_room_is_copied_before_anything_is_let_go() -> None:
    session = FakeSession(room=40)
    down, copier = rig(session, 64)
    down.adopt(run(0, 100))
    assert session.dropped == []
    assert sum(len(batch.sources) for batch in copier.batches) == 40
    assert down.backlog_blocks == 100


def test_what_has_waited_too_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    down, _ = rig(session, 64)
    down.adopt(run(0, 10))
    down.shed(older_than_s=60.0)
    assert session.dropped == []
    down.shed(older_than_s=-1.0)
    assert session.dropped == list(range(10))
    assert down.backlog_blocks == 0
