"""What a path's mover has, and how much more it should be given."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import NvmeThrottle
from kvstore.daemon.outstanding import Outstanding, longest_answer_s
from kvstore.moves import MoveKind
from kvstore.tiering.striping import PathLoad
from kvstore.units import GIB, KIB, MIB
from kvstore.wire.packed import MOVE


def moves(kind: MoveKind, ids: range, length: int = MIB) -> NDArray[np.void]:
    made = np.zeros(len(ids), dtype=MOVE)
    made["id"], made["kind"], made["length"] = ids, kind, length
    return made


def ids_of(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, dtype=np.uint64)


def test_answers_are_told_apart_and_counted_once() -> None:
    have = Outstanding()
    have.sent(moves(MoveKind.READ, range(1, 4)), 1.0)
    have.sent(moves(MoveKind.WRITE, range(10, 13)), 1.0)
    assert have.ended(ids_of(11, 2, 99), 1.5).tolist() == [True, False, False]
    assert (len(have), have.load.outstanding_bytes) == (4, 4 * MIB)
    assert have.ended(ids_of(11, 2), 1.6).tolist() == [False, False], "they are answered already"
    assert have.ended(ids_of(1, 3, 10, 12), 1.7).tolist() == [False, False, True, True]
    assert (len(have), have.load.outstanding_bytes) == (0, 0)
    assert have.ended(ids_of(1), 1.8).tolist() == [False]


def test_writes_leave_places_to_reads() -> None:
    """Writes to a slow disk took every place that its mover has, and a read waited for one of them to end."""
    have = Outstanding()
    have.sent(moves(MoveKind.WRITE, range(1, 2), 4 * KIB), 0.0)
    sent = 1
    while room := have.write_room:
        have.sent(moves(MoveKind.WRITE, range(sent + 1, sent + 1 + room), 4 * KIB), 0.0)
        sent += room
    assert sent == 768, "of 1,024"


def test_a_slow_disk_is_given_half_a_second_of_its_work() -> None:
    load = PathLoad()
    assert load.ahead_bytes == 8 * MIB, "before anything is known"
    load.began(100 * MIB, 0.0)
    for tenth in range(1, 11):
        load.ended(10 * MIB, tenth / 10)
    assert load.rate == pytest.approx(100 * MIB)
    assert load.ahead_bytes == pytest.approx(50 * MIB)
    load.began(MIB, 50.0)  # idle time is no time of the disk's
    load.ended(MIB, 50.01)
    assert load.rate == pytest.approx(100 * MIB)


def test_who_does_not_answer_is_more_loaded_every_second() -> None:
    load = PathLoad()
    load.began(MIB, 10.0)
    assert load.through_s(10.0) < 0.1
    assert load.through_s(14.0) == 4.0
    load.lost()
    assert load.through_s(15.0) < 0.1


def test_of_disks_that_are_alike_the_one_that_was_given_least_is_next() -> None:
    """The first of two idle disks got every block, and reads came from that one alone."""
    one, two = PathLoad(), PathLoad()
    for load, rate in ((one, 100 * MIB), (two, 104 * MIB)):
        load.began(rate, 0.0)
        load.ended(rate, 1.0)
    assert one.order(1.0) < two.order(1.0)
    one.began(8 * MIB, 1.0)
    one.ended(8 * MIB, 1.08)
    assert two.order(1.1) < one.order(1.1)


def test_a_disk_that_is_held_back_is_not_taken_for_one_that_hangs() -> None:
    """With a throttle of 1 MiB/s a block of 4 MiB takes four seconds, after three of which the disk was given up."""
    assert longest_answer_s(None) == 0.0
    assert longest_answer_s(NvmeThrottle(write_bytes_per_s=MIB)) == 16.0
    assert longest_answer_s(NvmeThrottle(read_bytes_per_s=GIB)) < 0.1
    assert longest_answer_s(NvmeThrottle(read_operations_per_s=1)) == 2.0


def test_reads_that_nobody_waits_for_keep_whoever_comes_waiting_for_a_moment_only() -> None:
    """All reads ahead were given to the mover at once: on a slow disk whoever came then waited for all of them."""
    have = Outstanding()
    assert have.early_room == 2
    have.sent(moves(MoveKind.READ, range(1, 3)), 1.0)
    assert have.early_room == 2, "never fewer than four blocks under way"
    have.sent(moves(MoveKind.WRITE, range(3, 33)), 1.0)
    assert have.early_room == 2, "writes are bounded by themselves"
    have.ended(ids_of(*range(1, 33)), 1.05)  # 32 MiB in 50 ms: 3.2 MiB in 5 ms
    assert have.early_room == 4
    have.sent(moves(MoveKind.READ, range(40, 70)), 2.0)
    assert have.early_room == 0
