"""When a write counts: after its sync, and never by the grace of a later one."""

from __future__ import annotations

import numpy as np

from kvstore.config import Durability
from kvstore.daemon.group_sync import Counted, GroupSync
from kvstore.moves import MoveStatus

OK, FAILED, NOT_SYNCED = int(MoveStatus.OK), int(MoveStatus.IO_ERROR), int(MoveStatus.NOT_SYNCED)


def answer(
    group: GroupSync, ids: list[int], *, statuses: list[int] | None = None, reads: bool = False
) -> Counted:
    told = np.array(statuses if statuses is not None else [OK] * len(ids), dtype=np.uint8)
    return group.answered(np.array(ids, dtype=np.uint64), told, np.full(len(ids), not reads))


def said(counted: Counted) -> list[tuple[int, int]]:
    return list(zip(counted.ids.tolist(), counted.statuses.tolist(), strict=True))


def test_a_write_counts_after_a_sync_that_was_sent_after_it() -> None:
    group = GroupSync(Durability.POWER)
    assert said(answer(group, [1, 2])) == []
    assert group.next_sync() == 1
    assert said(answer(group, [3])) == []
    assert group.next_sync() is None, "one at a time"
    assert said(group.went_well()) == [(1, OK), (2, OK)]
    assert not group.idle
    assert group.next_sync() == 2
    assert said(group.went_well()) == [(3, OK)]
    assert group.idle
    assert group.next_sync() is None


def test_reads_and_failures_count_at_once() -> None:
    group = GroupSync(Durability.POWER)
    assert said(answer(group, [1], reads=True)) == [(1, OK)]
    assert said(answer(group, [2, 3], statuses=[FAILED, OK])) == [(2, FAILED)]


def test_a_sync_that_fails_takes_with_it_what_was_being_written() -> None:
    """A write that was under way when a sync failed counted after the next one, which said nothing of it any more."""
    group = GroupSync(Durability.POWER)
    answer(group, [1])
    group.next_sync()
    answer(group, [2])
    assert said(group.failed("no", newest=4)) == [(1, NOT_SYNCED), (2, NOT_SYNCED)]
    assert said(answer(group, [3, 4])) == [(3, NOT_SYNCED), (4, NOT_SYNCED)]
    assert said(answer(group, [5])) == []
    group.next_sync()
    assert said(group.went_well()) == [(5, OK)]
    assert not group.doubt


def test_without_group_syncs_a_write_counts_at_once_and_a_failed_sync_is_remembered() -> None:
    """The second of two flushes was answered although the sync of the first had failed."""
    group = GroupSync(Durability.PROCESS)
    assert said(answer(group, [1])) == [(1, OK)]
    assert group.next_sync() is None
    assert said(group.failed("fdatasync failed: no", newest=0)) == []
    assert "fdatasync failed: no" in group.doubt


def test_a_mover_that_dies_leaves_nothing_to_sync() -> None:
    group = GroupSync(Durability.POWER)
    answer(group, [1])
    group.next_sync()
    answer(group, [2])
    group.lost()
    assert group.idle
    assert said(group.went_well()) == []
