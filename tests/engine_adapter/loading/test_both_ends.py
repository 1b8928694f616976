"""Pieces of a request that find no pages: they wait for them, as long as they are needed."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier
from engine_adapter.loading import both_ends as module
from engine_adapter.loading.both_ends import BothEnds
from engine_adapter.loading.choice import LoadChoice
from kvstore.client import Namespace, Session
from kvstore.layout import Tier
from kvstore.moves import Outcome

BLOCKS, PIECE, BLOCK_TOKENS = 24, 4, 16


class Store:
    """Has every block in HBM, and slots for the leading blocks of a piece only, until there is `room`."""

    def __init__(self) -> None:
        self.room = False
        self.tier = Tier.DRAM
        self.asked: list[int] = []
        self.dropped: list[NDArray[np.uint32]] = []
        self.hbm = SimpleNamespace(slot_bytes=1000)

    def match(self, namespace: object, hashes: NDArray[np.uint64]) -> SimpleNamespace:
        return SimpleNamespace(tiers=np.full(len(hashes), self.tier, dtype=np.uint8))

    def acquire(
        self, namespace: object, lease: int, hashes: NDArray[np.uint64], *, first: int
    ) -> SimpleNamespace:
        self.asked.append(first)
        outcomes = np.full(len(hashes) - first, Outcome.HIT_HBM, dtype=np.uint8)
        if self.tier is Tier.NVME:
            outcomes[:] = Outcome.PROMOTING
        elif not self.room:
            outcomes[1:] = Outcome.NO_SLOT
        grant = SimpleNamespace(outcomes=outcomes, hbm_slots=np.arange(first, len(hashes), dtype=np.uint32))
        return SimpleNamespace(
            done=lambda: True, error=None, result=lambda timeout_s: grant, abandon=lambda: None
        )

    def notify(self) -> None:
        pass

    def stage(self, *, dropped_hbm: NDArray[np.uint32]) -> None:
        self.dropped.append(dropped_hbm)

    def cancel(self, lease: int) -> None:
        pass


def both_ends(
    store: Store, now: list[float], measured: list[tuple[int, float]] | None = None, *, waits: bool = True
) -> BothEnds:
    found: list[tuple[int, float]] = [] if measured is None else measured
    choice = SimpleNamespace(
        piece_blocks=lambda blocks: PIECE,
        queued_bytes=lambda: 0,
        loaded_beside=lambda nbytes, seconds: found.append((nbytes, round(seconds, 3))),
        not_loaded_beside=lambda nbytes, seconds: None,
    )
    return BothEnds(
        cast(Session, store),
        cast(Copier, None),
        cast(Namespace, SimpleNamespace(block_tokens=BLOCK_TOKENS)),
        cast(LoadChoice, choice),
        np.zeros((BLOCKS, 2), dtype=np.uint64),
        0,
        count(),
        lambda: now[0],
        waits=waits,
    )


def test_a_piece_that_is_not_what_was_stored_comes_into_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given back, and its tokens are computed."""
    store, now = Store(), [10.0]
    store.room = True
    wrong = iter([True])

    def load_of(session: object, grant: object) -> SimpleNamespace:
        return SimpleNamespace(
            submit=lambda copier: None,
            failed=False,
            loaded=True,
            wrong=next(wrong, False),
            ended_at=now[0],
        )

    monkeypatch.setattr(module, "_load_of", load_of)
    both = both_ends(store, now)
    for _ in range(8):
        both.work()
    taken = [loaded.piece.begin for loaded in both.take(0).pieces]
    assert store.asked[0] == BLOCKS - PIECE
    assert BLOCKS - PIECE not in taken
    assert [slots.tolist() for slots in store.dropped] == [list(range(BLOCKS - PIECE, BLOCKS))]


def test_a_piece_that_finds_no_page_waits_for_one() -> None:
    """Where HBM had no page to spare for a piece, nothing more was loaded, and all before it was computed."""
    store, now = Store(), [10.0]
    both = both_ends(store, now)
    for _ in range(5):
        assert both.work()
    first = list(store.asked)
    assert first == [20, 16, 12]  # once each: not at every look
    assert both.take(0).pieces == []
    store.room = True
    now[0] += 0.03
    for _ in range(8):
        both.work()
    loaded = [loaded.piece for loaded in both.take(0).pieces]
    assert sorted((piece.begin, piece.end) for piece in loaded) == [
        (at, at + PIECE) for at in range(0, BLOCKS, PIECE)
    ]


@pytest.mark.parametrize("waits", [False, True])
def test_what_tries_a_disk_is_measured_though_all_is_computed_by_then(waits: bool) -> None:
    """A prompt of one step is computed, as far as loads go, once it is launched: all it had asked for was let go of."""
    store, now, measured = Store(), [10.0], list[tuple[int, float]]()
    store.tier = Tier.NVME
    both = both_ends(store, now, measured, waits=waits)
    assert both.work()
    both.take(BLOCKS * BLOCK_TOKENS)
    now[0] += 0.03
    assert both.work() is not waits
    assert measured == []
    store.tier = Tier.DRAM
    assert not both.work()
    assert measured == ([] if waits else [(4000, 0.03), (8000, 0.03), (12000, 0.03)])
    assert both.take(BLOCKS * BLOCK_TOKENS).pieces == []


def test_what_is_in_memory_says_nothing_of_a_disk() -> None:
    """Pieces that DRAM had were taken for loads from a disk, which was then planned with at 25 GB/s."""
    store, now, measured = Store(), [10.0], list[tuple[int, float]]()
    both = both_ends(store, now, measured, waits=False)
    both.take(BLOCKS * BLOCK_TOKENS)
    for _ in range(4):
        both.work()
        now[0] += 0.01
    assert measured == []


def test_what_this_engine_has_computed_says_nothing_of_a_disk() -> None:
    """It is in HBM as it is published: measured like that, a disk is as fast as prefill."""
    store, now, measured = Store(), [10.0], list[tuple[int, float]]()
    store.tier = Tier.NVME
    both = both_ends(store, now, measured, waits=False)
    both.work()
    both.take(BLOCKS * BLOCK_TOKENS)
    store.tier = Tier.HBM
    assert not both.work()
    assert measured == []
