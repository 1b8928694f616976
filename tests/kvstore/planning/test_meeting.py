"""A prefix from both ends: what the computation does while loads are expected."""

from __future__ import annotations

from kvstore.planning.meeting import Meeting
from kvstore.planning.speeds import PrefillSpeed, TierSpeed

BLOCK_TOKENS, SLOT_BYTES = 16, 1 << 20
PREFILL = PrefillSpeed(step_s=0.001, token_s=0.001, context_s=0.0)
FAST = TierSpeed(start_s=0.001, byte_s=1e-10)


def meeting_with_all_asked_for() -> Meeting:
    meeting = Meeting(begin=0, end=64, piece=32)
    assert [len(piece) for piece in meeting.ask(0.0)] == [32, 32]
    return meeting


def test_a_computation_waits_for_loads_that_come_sooner() -> None:
    stop = meeting_with_all_asked_for().stop(0, 0.0, BLOCK_TOKENS, SLOT_BYTES, (PREFILL, FAST))
    assert stop == 0


def test_one_that_only_tries_the_disk_waits_for_nothing() -> None:
    """On an H200 one stood still for 0.13 s of 0.21 s, for pieces that were not to change anything."""
    meeting = meeting_with_all_asked_for()
    assert meeting.stop(0, 0.0, BLOCK_TOKENS, SLOT_BYTES, (PREFILL, FAST), waits=False) > 0
