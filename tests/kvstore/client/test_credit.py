"""What a client holds of one tier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.client.credit import HeldSlots


def u32(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def test_a_slot_is_released_when_its_last_user_lets_go() -> None:
    held = HeldSlots(16)
    held.granted(u32(3, 4), u32(7, 8))
    held.granted(u32(4), u32(8))  # a second request hits the same block
    assert held.drop(u32(3, 4))
    assert held.take_leaving(100).tolist() == [3]
    assert held.drop(u32(4))
    assert held.take_leaving(100).tolist() == [4]
    assert not held.held.any()


def test_a_release_does_not_overtake_a_grant_that_was_read() -> None:
    """A release decided before a grant and sent after it gave the granted slot away (the classic of counted leases)."""
    held = HeldSlots(16)
    held.granted(u32(5), u32(1))
    held.drop(u32(5))
    held.granted(u32(5), u32(1))
    assert held.take_leaving(100).tolist() == []
    assert held.held[5]
    held.drop(u32(5))
    assert held.take_leaving(100).tolist() == [5]


def test_a_seal_staged_after_the_drop_keeps_the_slot() -> None:
    held = HeldSlots(16)
    held.granted(u32(5), u32(1))
    held.drop(u32(5))
    held.share(u32(5))
    assert held.take_leaving(100).tolist() == []
    held.drop(u32(5))
    assert held.take_leaving(100).tolist() == [5]


def test_credit_is_taken_whole_or_not_at_all() -> None:
    held = HeldSlots(16)
    held.credited(u32(1, 2), u32(1, 1))
    held.credited(u32(9), u32(4))
    assert held.take(4) is None
    assert held.in_hand == 3
    run = held.take(2)
    assert run is not None
    assert run.slots.tolist() == [1, 2]
    assert held.in_hand == 1
    empty = held.take(0)
    assert empty is not None
    assert len(empty) == 0
    last = held.take(1)
    assert last is not None
    assert last.generations.tolist() == [4]
    held.drop(u32(1, 2, 9))
    assert held.take_leaving(2).tolist() == [1, 2]
    assert held.leaving
    assert held.take_leaving(2).tolist() == [9]
    assert not held.leaving


def test_credit_that_is_given_back_is_released() -> None:
    held = HeldSlots(16)
    held.credited(u32(1, 2), u32(1, 1))
    held.give_back()
    assert held.in_hand == 0
    assert held.take_leaving(100).tolist() == [1, 2]


def test_lost_slots_are_never_named_again() -> None:
    held = HeldSlots(16)
    held.credited(u32(1, 2), u32(1, 1))
    held.granted(u32(7, 8), u32(1, 1))
    assert held.lose(u32(1, 7, 11)).tolist() == [7]
    assert held.in_hand == 1
    assert not held.drop(u32(7))
    assert held.take_leaving(100).tolist() == []
    assert held.statement(u32()).slots.tolist() == [2, 8]


def test_a_statement_names_what_unanswered_messages_released() -> None:
    """A seal whose step was lost came back STALE, because the resume had given its slot away."""
    held = HeldSlots(16)
    held.granted(u32(3, 4), u32(7, 8))
    held.drop(u32(3))
    released = held.take_leaving(100)
    statement = held.statement(released)
    assert statement.slots.tolist() == [3, 4]
    assert statement.generations.tolist() == [7, 8]
