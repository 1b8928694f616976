"""The copier of a group: a batch is complete when every process has copied its part, and not before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.group.copier import MAX_GROUP_BLOCKS, GroupCopier
from engine_adapter.group.link import MAX_COPY_BLOCKS, Computing, Copy
from engine_adapter.group.member import _StoreMember
from kvstore.errors import Unavailable


class Own:
    """This process's copier: completes when it is told to."""

    def __init__(self) -> None:
        self.batches: list[CopyBatch] = []
        self.full = False
        self.closed = False
        self.steps = 0

    def submit(self, batch: CopyBatch) -> bool:
        if not self.full:
            self.batches.append(batch)
        return not self.full

    def cancel(self, batch: CopyBatch) -> bool:
        return True

    def computing(self, steps: int) -> None:
        self.steps = steps

    def close(self, timeout_s: float) -> None:
        self.closed = True


class Others:
    """Two members, which remember what they are told."""

    members = 3

    def __init__(self) -> None:
        self.told: list[Copy] = []
        self.computing: list[int] = []
        self.gone = False

    def tell(self, message: Copy | Computing) -> None:
        if self.gone:
            raise Unavailable("process 1 of the model has gone")
        if isinstance(message, Computing):
            self.computing.append(message.steps)
        else:
            self.told.append(message)


def batch(done: list[str], blocks: int = 4, direction: Direction = Direction.STORE) -> CopyBatch:
    slots = np.arange(blocks, dtype=np.uint32)
    return CopyBatch(
        direction=direction,
        sources=slots.astype(np.uint64),
        targets=slots.astype(np.uint64),
        nbytes=4096,
        done=lambda: done.append("done"),
        hbm_slots=slots,
        dram_slots=slots + 100,
    )


def test_a_batch_fails_with_this_processs_part_whatever_the_others_say() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    assert copier.submit(replace(batch(done), failed=lambda: done.append("failed")))
    own.batches[0].failed()  # type: ignore[misc]
    assert done == ["failed"]
    for _ in range(2):
        copier.copied(others.told[0].number)
    assert done == ["failed"]
    copier.close(0.1)


def test_the_last_part_completes_a_batch() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    assert copier.submit(batch(done))
    (told,) = others.told
    assert told.direction is Direction.STORE
    assert told.hbm_slots.tolist() == [0, 1, 2, 3]
    assert told.dram_slots.tolist() == [100, 101, 102, 103]
    copier.copied(told.number)
    own.batches[0].done()
    assert done == []
    copier.copied(told.number)
    assert done == ["done"]


def test_batches_complete_by_themselves() -> None:
    own, others = Own(), Others()
    copier = GroupCopier(own, others)
    first, second = list[str](), list[str]()
    assert copier.submit(batch(first))
    assert copier.submit(batch(second, direction=Direction.LOAD))
    for _ in range(2):
        copier.copied(others.told[1].number)
    own.batches[1].done()
    assert (first, second) == ([], ["done"])


def test_a_large_batch_is_told_in_several_messages() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    assert copier.submit(batch(done, MAX_COPY_BLOCKS + 1))
    assert [len(told.hbm_slots) for told in others.told] == [MAX_COPY_BLOCKS, 1]
    own.batches[0].done()
    for told in others.told * 2:
        assert done == []
        copier.copied(told.number)
    assert done == ["done"]


def test_what_the_own_copier_refuses_nobody_is_told() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    own.full = True
    assert not copier.submit(batch(done))
    assert others.told == []
    own.full = False
    assert copier.submit(batch(done, MAX_GROUP_BLOCKS))  # nothing of the refused one is counted


def test_what_is_under_way_is_bounded_in_each_direction() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    assert copier.submit(batch(done, MAX_GROUP_BLOCKS))
    assert not copier.submit(batch(done, 1))
    assert copier.submit(batch(done, 1, Direction.LOAD))
    own.batches[0].done()
    for told in others.told[:-1] * 2:
        copier.copied(told.number)
    assert done == ["done"]
    assert copier.submit(batch(done, 1))


def test_what_was_taken_is_not_taken_back() -> None:
    """A member may have begun, so the slots stay in use until `done`."""
    copier = GroupCopier(Own(), Others())
    taken = batch([])
    assert copier.submit(taken)
    assert not copier.cancel(taken)


def test_the_end_waits_for_the_members() -> None:
    own, others, done = Own(), Others(), list[str]()
    copier = GroupCopier(own, others)
    assert copier.submit(batch(done))
    own.batches[0].done()
    copier.close(0.01)  # in vain
    assert own.closed
    assert not copier.submit(batch(done))
    for _ in range(2):
        copier.copied(others.told[0].number)
    copier.close(10.0)
    assert done == ["done"]


def test_members_hear_when_the_engine_computes() -> None:
    """They were never told: with small blocks their kernels held up decode on every device but the first."""
    own, others = Own(), Others()
    copier = GroupCopier(own, others)
    for steps in (1, 2, 1, 2, 1, 0, 0, 1):
        copier.computing(steps)
        assert own.steps == steps
    assert others.computing == [1, 0, 1]  # no message a step while one stays in flight
    others.gone = True
    copier.computing(0)  # it is no error of a step: who waits for the member says so
    assert own.steps == 0


def test_a_member_tells_its_own_copier() -> None:
    member, own = _StoreMember.__new__(_StoreMember), Own()
    member._copier = own
    for steps in (1, 0):
        member._handle(Computing(steps=steps))
        assert own.steps == steps
