"""When the store is told what a prefill has computed."""

from __future__ import annotations

from engine_adapter.blocks.telling import Telling


class Prefill:
    """Steps of a prompt at moments that the test chooses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.telling = Telling(lambda: self.now)

    def step(self, at_s: float, *, last: bool) -> bool:
        self.now = 100.0 + at_s
        self.telling.sealed(goes_on=not last)
        return self.telling.due(waiting=False)


def test_seals_of_small_steps_leave_together_and_the_last_at_once() -> None:
    prefill = Prefill()
    prefill.telling.hurry()
    ends = [0.02 * number for number in range(1, 9)]
    told = [end for end in ends if prefill.step(end, last=end == ends[-1])]
    assert told == [ends[0], ends[5], ends[-1]]


def test_a_step_that_is_long_tells_at_once() -> None:
    prefill = Prefill()
    assert all(prefill.step(0.2 * number, last=False) for number in range(5))


def test_a_step_without_a_part_of_a_prompt_says_what_waited() -> None:
    prefill = Prefill()
    assert prefill.step(0.0, last=False)
    assert not prefill.step(0.01, last=False)
    assert prefill.step(0.02, last=True)


def test_steps_that_only_decode_look_a_hundred_times_a_second() -> None:
    decode = Prefill()
    assert decode.step(0.0, last=True)
    told = []
    for ms in range(4, 37, 4):
        decode.now = 100.0 + ms / 1000
        if decode.telling.due(waiting=False):
            told.append(ms)
    assert told == [12, 24, 36]


def test_a_block_that_decoding_has_filled_is_told_at_once() -> None:
    decode = Prefill()
    assert decode.step(0.0, last=True)
    assert decode.step(0.001, last=True)
    assert not decode.telling.due(waiting=False)


def test_while_a_request_waits_every_step_tells() -> None:
    decode = Prefill()
    assert decode.step(0.0, last=True)
    assert decode.telling.due(waiting=True)
    assert decode.telling.due(waiting=True)


def test_what_somebody_lacks_does_not_wait() -> None:
    prefill = Prefill()
    assert prefill.step(0.0, last=False)
    prefill.telling.hurry()
    assert prefill.step(0.01, last=False)
