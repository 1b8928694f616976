"""What is written when writing is dear: the daily budget holds whatever happens, and the best blocks go first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.moves import StoreLimits
from kvstore.tiering.admission import DAY_MS, Admission, TouchSketch, WriteBudget
from tests.kvstore.store_rig import PAGE, Rig, chain

HOUR_MS = DAY_MS // 24
BLOCK = 2 * PAGE  # a slot of a page and its trailer
ROOT = np.arange(0, 64, dtype=np.uint32)


# ------------------------------------------------------------ the budget


@given(
    st.integers(4, 1 << 40),
    st.lists(st.tuples(st.integers(0, DAY_MS // 3), st.floats(0, 1)), min_size=1, max_size=40),
)
def test_no_24_hours_have_more_than_the_budget(day: int, wants: list[tuple[int, float]]) -> None:
    """A bucket of a whole day that also refilled through it let two days' worth through in one."""
    budget, now_ms, spent = WriteBudget(day), 1_700_000_000_000, list[tuple[int, int]]()
    for wait_ms, part in wants:
        now_ms += wait_ms
        amount = int(budget.left_bytes(now_ms) * part)
        budget.spend(now_ms, amount)
        spent.append((now_ms, amount))
    for end_ms, _ in spent:
        within = sum(amount for at_ms, amount in spent if end_ms - DAY_MS <= at_ms <= end_ms)
        assert within <= day + len(spent), "a byte each for the rounding"


@given(
    st.integers(1 << 20, 1 << 40),
    st.lists(
        st.tuples(st.integers(0, DAY_MS // 8), st.floats(0, 1), st.sampled_from(["run", "kill", "stop"])),
        min_size=1,
        max_size=40,
    ),
)
def test_no_24_hours_have_more_over_kills(day: int, lives: list[tuple[int, float, str]]) -> None:
    """A daemon that was killed began the next life with a full budget: a restart every hour was a day's worth each."""
    now_ms = 1_700_000_000_000
    disk = (0, now_ms)  # debt, as of
    budget = WriteBudget(day)
    budget.restore(*disk, now_ms)
    spent = list[tuple[int, int]]()
    for wait_ms, part, then in lives:
        now_ms += wait_ms
        if (promise := budget.to_promise(now_ms)) is not None:
            disk = (promise, now_ms)
            budget.promised(*disk)
        amount = int(budget.left_bytes(now_ms) * part)
        budget.spend(now_ms, amount)
        spent.append((now_ms, amount))
        if then == "stop":
            disk = (budget.debt_bytes(now_ms), now_ms)
        if then != "run":
            budget = WriteBudget(day)
            budget.restore(*disk, now_ms)
    for end_ms, _ in spent:
        within = sum(amount for at_ms, amount in spent if end_ms - DAY_MS <= at_ms <= end_ms)
        assert within <= day + 4 * len(spent), "some bytes for the rounding"


def test_a_budget_is_used_up_and_comes_back() -> None:
    budget = WriteBudget(24 << 30)
    assert budget.left_bytes(0) == 6 << 30, "a quarter at once"
    budget.spend(0, 6 << 30)
    assert budget.left_bytes(0) == 0
    assert budget.fullness(0) == 0
    assert budget.left_bytes(4 * HOUR_MS) == 3 << 30, "the other three quarters through the day"
    budget.spend(4 * HOUR_MS, 5 << 30)  # a flush
    assert budget.left_bytes(5 * HOUR_MS) == 0
    assert budget.left_bytes(0) == 0, "a clock that was set back changes nothing"
    assert budget.left_bytes(3 * DAY_MS) == 6 << 30


def test_without_a_budget_nothing_is_counted() -> None:
    budget = WriteBudget(0)
    budget.spend(0, 1 << 60)
    assert budget.left_bytes(0) >= 1 << 60
    assert budget.fullness(0) == 1
    assert budget.to_promise(0) is None


# ------------------------------------------------------------ the sketch


def test_counts_halve_in_an_hour() -> None:
    sketch, blocks = TouchSketch(), chain(8)
    now_ms = 1_700_000_000_000
    assert sketch.add(blocks, now_ms).tolist() == [1.0] * 8
    assert sketch.add(blocks, now_ms + HOUR_MS).tolist() == [1.5] * 8
    assert sketch.counts(blocks, now_ms + 2 * HOUR_MS).tolist() == [0.75] * 8
    assert sketch.counts(chain(8, seed=1), now_ms).tolist() == [0.0] * 8


def test_counts_last_for_years() -> None:
    """Weights that grow for weeks overflowed a double, and every block counted as used for ever or never."""
    sketch, now_ms = TouchSketch(), 0
    for _ in range(100):
        now_ms += 30 * DAY_MS
        assert sketch.add(chain(4), now_ms) == pytest.approx(np.ones(4))
    assert sketch.add(chain(4), now_ms) == pytest.approx(np.full(4, 2.0))


@given(st.lists(st.integers(0, 40), max_size=200))
def test_counts_are_never_too_small(uses: list[int]) -> None:
    sketch, blocks = TouchSketch(), chain(41)
    for block in uses:
        sketch.add(blocks[block : block + 1], 1000)
    true = np.bincount(np.array(uses, dtype=np.int64), minlength=41)
    assert (sketch.counts(blocks, 1000) >= true).all()


# ------------------------------------------------------------ the choice


def chosen(admission: Admission, pressure: float, *, touches: int = 1, rows: np.ndarray = ROOT) -> list[bool]:
    """Of a chain of 64 blocks."""
    decided = admission.choose(
        rows.astype(np.uint32),
        chain(64)[: len(rows)],
        np.arange(len(rows), dtype=np.uint32),
        np.full(len(rows), touches, dtype=np.uint64),
        1_700_000_000_000,
        (pressure, True),
    )
    return decided.chosen.tolist()


def test_everything_is_admitted_while_nothing_is_short() -> None:
    assert all(chosen(Admission(paths=1, rows=64, day_bytes=0), 0.0))
    assert all(chosen(Admission(paths=1, rows=64, day_bytes=1 << 30), 0.0))


def test_shallow_blocks_go_first() -> None:
    admission = Admission(paths=1, rows=64, day_bytes=1 << 30)
    assert chosen(admission, 0.25) == [True] * 24 + [False] * 40
    assert chosen(admission, 0.75) == [True] * 8 + [False] * 56
    assert not any(chosen(admission, 1.0))


def test_what_is_used_again_is_admitted() -> None:
    admission = Admission(paths=1, rows=64, day_bytes=1 << 30)
    assert not any(chosen(admission, 1.0, touches=1))
    assert not any(chosen(admission, 1.0, touches=1)), "to be asked again is no use"
    assert all(chosen(admission, 1.0, touches=2))


def test_what_was_lost_and_comes_back_was_used_before() -> None:
    """A block that was refused and left DRAM began anew when it was computed again, in whatever row it stood then."""
    admission = Admission(paths=1, rows=128, day_bytes=1 << 30)
    assert not any(chosen(admission, 1.0, touches=1))
    assert all(chosen(admission, 1.0, touches=2, rows=ROOT + 64))


def test_pressure_is_that_of_the_emptiest_need() -> None:
    admission = Admission(paths=2, rows=64, day_bytes=1 << 30)
    assert admission.pressure(0, [0, 1], 0, 100) == (0.0, False)
    admission.budgets[0].spend(0, 1 << 28)
    assert admission.pressure(0, [0, 1], 0, 100)[0] == 0, "the other path has plenty"
    assert admission.pressure(0, [0], 0, 100) == (1.0, True)
    assert admission.pressure(0, [1], 75, 100) == (0.5, False)
    assert admission.pressure(0, [1], 100, 100) == (1.0, False)


# ------------------------------------------------------------ in the store


def rig_with(blocks_a_day: int, **limits: int) -> Rig:
    return Rig(
        hbm=64,
        dram=64,
        nvme=64,
        limits=StoreLimits(
            reserve_slots=1, reserve_fraction=0.0, write_budget_bytes=blocks_a_day * BLOCK, **limits
        ),
    )


def later(rig: Rig, ms: int) -> None:
    """Time goes by, and the background has its turn."""
    rig.now_ms += ms
    rig.store.tick(rig.now_ms)


def test_the_disk_gets_no_more_than_its_budget() -> None:
    rig = rig_with(32)
    one = rig.attach()
    rig.write_through(one, chain(20))
    assert len(rig.write_down()) == 8, "a quarter of a day"
    assert len(rig.write_down()) == 0
    later(rig, 4 * HOUR_MS)
    assert len(rig.write_down()) == 4
    assert rig.counter("writes") == 12
    rig.check()


def test_when_the_budget_is_short_the_second_use_decides() -> None:
    """With a budget, what came first was written and what is used again and again was not."""
    rig = rig_with(64)
    one = rig.attach()
    rig.store.budget(0).spend(rig.now_ms, 14 * BLOCK)  # two of sixteen are left
    rig.write_through(one, chain(20))
    refused = rig.counter("refused_writes_budget")
    assert 8 < refused < 20
    assert rig.counter("admitted_writes") == 20 - refused
    later(rig, 10)
    assert rig.counter("refused_writes_budget") == refused, "counted once"
    rig.outcomes(one, chain(20))  # used again
    rig.write_down()
    later(rig, 2000)
    assert rig.counter("admitted_writes") == 20
    for _ in range(24):
        later(rig, HOUR_MS)
        rig.write_down()
    assert rig.counter("writes") == 20
    rig.check()


def test_a_flush_asks_nobody() -> None:
    """Flush returned with blocks still to come until the budget had come back: acknowledged durable took a day."""
    rig = rig_with(64)
    one = rig.attach()
    rig.store.budget(0).spend(rig.now_ms, 16 * BLOCK)
    rig.write_through(one, chain(20))
    assert len(rig.write_down()) == 0
    mark = rig.store.flush()
    assert len(rig.write_down()) == 20
    assert rig.store.left_of(mark).missing == 0
    assert rig.counter("flushed_writes") == 20
    assert rig.store.budget(0).left_bytes(rig.now_ms) == 0
    rig.check()


def test_what_waits_is_flushed_too() -> None:
    rig = rig_with(64)
    one = rig.attach()
    rig.write_through(one, chain(20))
    assert rig.store.stats().queued_writes == 20
    rig.store.flush()
    assert rig.store.stats().queued_writes == 20
    assert len(rig.write_down()) == 20
    assert rig.store.stats().queued_writes == 0
    assert len(rig.store._moving._writing._queue) == 0
    rig.check()


def test_a_short_queue_takes_what_is_shallow() -> None:
    rig = rig_with(0, max_writes=40)
    one = rig.attach()
    rig.write_through(one, chain(30))
    rig.write_through(one, chain(30, seed=1))
    assert rig.store.stats().queued_writes < 60
    assert rig.counter("refused_writes_queue") > 0
    for _ in range(4):
        rig.write_down()
        later(rig, 2000)
    assert rig.counter("writes") == 60, "what was refused for want of place comes when there is place"
    rig.check()
