"""Next turns: conversations are known by where their prompts end, and their blocks come while nothing else is done."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.reuse_ages import ReuseAges
from kvstore.layout import Tier
from kvstore.moves import MoveKind, Outcome, StoreLimits
from kvstore.tiering.next_turns import CLASSES, NextTurns
from tests.kvstore.store_rig import PAGE, Rig, chain

IDLE_MS = 600


class Always:
    """Ages that say the same of each class: `worth` of what is asked for, `others` of all blocks."""

    def __init__(self, worth: float = 1.0, others: float = 0.0) -> None:
        self.worth, self.others = worth, others
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.began_s: list[float] = []

    def begin(self, classes: np.ndarray, now_s: float) -> int:
        self.begun += classes.tolist()
        self.began_s.append(now_s)
        return len(self.begun) - 1

    def end(self, lives: np.ndarray, now_s: float) -> np.ndarray:
        self.ended += lives.tolist()
        return np.array([now_s - self.began_s[life] for life in lives.tolist()])

    def refresh(self, now_s: float) -> None:
        pass

    def worth_at(self, classes: np.ndarray, ages_s: np.ndarray) -> np.ndarray:
        of_all = classes == (CLASSES[0] - 1) * CLASSES[1]
        return np.where(of_all, self.others, self.worth)


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.uint32)


def words_of(rows: np.ndarray, generation: int = 1) -> np.ndarray:
    return np.full(len(rows), generation << 8, dtype=np.uint64)


def turn(turns: NextTurns, now_ms: int, *rows: int, generation: int = 1) -> None:
    turns.turn(rows_of(*rows), words_of(rows_of(*rows), generation), now_ms)


def test_a_prompt_that_goes_on_is_the_next_turn_of_the_deepest_it_contains() -> None:
    ages = Always()
    turns = NextTurns(64, ages)
    turn(turns, 1_000, 1, 2)  # what many share
    turn(turns, 2_000, 1, 2, 3)  # goes on with it
    turn(turns, 3_000, 1, 2)
    turn(turns, 19_000, 1, 2, 3, 4)  # goes on with the second, not with the third
    assert ages.ended == [0, 1]
    classes = [(each // CLASSES[1], each % CLASSES[1]) for each in ages.begun]
    assert classes == [(0, 10), (1, 0), (0, 10), (2, 2)]  # 17 s are in the third pair of octaves
    assert len(turns.due(20_000, 9)) == 2


def test_a_row_that_holds_another_block_is_no_conversation() -> None:
    ages = Always()
    turns = NextTurns(64, ages)
    turn(turns, 1_000, 1, 2)
    turn(turns, 2_000, 1, 2, 3, generation=2)
    assert ages.ended == []


def test_what_is_not_worth_a_slot_within_the_hour_is_not_due() -> None:
    turns = NextTurns(64, Always(worth=1 / 4000))
    turn(turns, 1_000, 1, 2)
    assert turns.due(2_000, 9) == []


def test_conversations_are_bounded() -> None:
    turns = NextTurns(1 << 14, Always())
    for row in range(5000):
        turn(turns, 1_000 + row, row)
    assert len(turns.due(9_000, 10_000)) == 4096
    assert int((turns._of_row >= 0).sum()) == 4096


def test_it_learns_which_conversations_go_on_soon() -> None:
    """Those that came back after ten seconds each time are due before those that never did."""
    turns = NextTurns(1 << 12, ReuseAges(CLASSES, 1 << 12))
    now_ms = 0
    for number in range(1500):
        first = 2 * number
        turn(turns, now_ms, first)
        if number % 2:
            turn(turns, now_ms + 10_000, first, first + 1)
        now_ms += 20_000
    turn(turns, now_ms, 4000)
    (due,) = turns.due(now_ms + 2_000, 1)
    assert due.worth > 1 / 3600
    old = turns.worth_of_all(np.array([now_ms - 3_600_000]), now_ms)
    assert old[0] < due.worth / 2


def served(rig: Rig, session: int, hashes: np.ndarray) -> None:
    """A prompt is asked for, has its blocks, and lets them go; then only storage has them."""
    rig.write_through(session, hashes)
    rig.write_down()
    assert (rig.acquire(session, hashes).outcomes == Outcome.HIT_HBM).all()
    rig.step(session, hbm=np.arange(256, dtype=np.uint32)[rig.store._state.hbm.holders != 0])
    rig.evict_hbm()
    rig.evict_dram()


def made(ages: Always, **sizes: int) -> Rig:
    limits = StoreLimits(reserve_slots=0, reserve_fraction=0.0)
    rig = Rig(**({"dram": 16, "nvme": 64, "hbm": 32} | sizes), limits=limits)
    rig.store.prefetching.turns = NextTurns(256, ages)
    return rig


def ticks(rig: Rig, count: int = 2) -> None:
    for _ in range(count):
        rig.now_ms += IDLE_MS
        rig.store.tick(rig.now_ms)


def test_blocks_of_a_next_turn_come_while_nothing_else_is_done() -> None:
    rig = made(Always())
    one = rig.attach()
    served(rig, one, chain(4))
    ticks(rig)
    moves = rig.write_down()
    assert moves["hash"].tolist() == chain(4).tolist()
    assert (moves["kind"] == MoveKind.READ).all()
    assert rig.outcomes(one, chain(4)) == [Outcome.HIT_DRAM] * 4
    assert rig.counter("next_turn_useful_bytes") == 4 * PAGE
    assert rig.counter("prefetch_useful_bytes") == 0
    rig.check()


@pytest.mark.parametrize("why", ["read", "queued", "write"])
def test_nothing_comes_while_a_disk_has_something_to_do(why: str) -> None:
    rig = made(Always())
    one = rig.attach()
    served(rig, one, chain(4))
    served(rig, one, chain(2, seed=1))
    if why == "read":
        rig.acquire(one, chain(1, seed=1), lease=7)
        rig.store.take_moves(0, 1)
    elif why == "queued":
        rig.store.prefetch(
            now_ms=rig.now_ms, session=one, namespace=rig.namespaces[one], lease=8, hashes=chain(1, seed=1),
            deadline_ms=0,
        )  # fmt: skip
        rig.write_down()
    else:
        rig.write_through(one, chain(1, seed=2))
    before = rig.counter("promotions")
    rig.now_ms += IDLE_MS
    rig.store.tick(rig.now_ms)
    assert MoveKind.READ not in rig.store.take_moves(0, 100)["kind"]
    assert rig.counter("promotions") == before
    rig.check()


@pytest.mark.parametrize("others, comes", [(0.6, 0), (0.4, 2)])
def test_only_blocks_worth_less_than_half_as_much_make_room(others: float, comes: int) -> None:
    rig = made(Always(worth=1.0, others=others), dram=4)
    one = rig.attach()
    served(rig, one, chain(2))
    rig.write_through(one, chain(4, seed=1))
    rig.write_down()
    rig.evict_hbm()
    ticks(rig)
    assert len(rig.store.take_moves(0, 100)) == comes
    assert rig.tier(Tier.DRAM).sealed_slots == 4 - comes
    rig.check()


def test_each_is_brought_once_a_turn() -> None:
    rig = made(Always())
    one = rig.attach()
    served(rig, one, chain(4))
    ticks(rig)
    assert len(rig.write_down()) == 4
    ticks(rig)
    rig.evict_dram()
    ticks(rig)
    assert len(rig.store.take_moves(0, 100)) == 0
    assert rig.counter("next_turn_wasted_bytes") == 4 * PAGE
    rig.check()
