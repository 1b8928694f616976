"""Prefetch: by deadline, once for all who want a block, into room that hurts nobody, and undone with its request."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.layout import Tier
from kvstore.moves import MoveKind, MoveStatus, Outcome, StoreLimits
from kvstore.tiering.queued import NO_DEADLINE_MS
from tests.kvstore.store_rig import PAGE, Rig, chain

HBM, DRAM, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.PROMOTING


def on_disk(rig: Rig, session: int, hashes: np.ndarray, *, path: int = 0) -> None:
    """Brings a prompt to storage and takes it from everywhere else."""
    rig.write_through(session, hashes)
    rig.write_down(path=path)
    rig.evict_hbm()
    rig.evict_dram()


def in_dram(rig: Rig, session: int, hashes: np.ndarray) -> None:
    """As `on_disk`, and DRAM keeps it."""
    rig.write_through(session, hashes)
    rig.write_down()
    rig.evict_hbm()


def prefetch(rig: Rig, session: int, hashes: np.ndarray, *, lease: int = 1, in_ms: int | None = None) -> None:
    """A request waits, and is expected to run so much later."""
    rig.now_ms += 1
    rig.store.prefetch(
        now_ms=rig.now_ms,
        session=session,
        namespace=rig.namespaces[session],
        lease=lease,
        hashes=hashes,
        deadline_ms=0 if in_ms is None else rig.now_ms + in_ms,
    )


def reads(rig: Rig, limit: int = 1000) -> list[list[int]]:
    """Hashes of the blocks that the mover is told to read; it has done that."""
    moves = rig.store.take_moves(0, limit)
    assert (moves["kind"] == MoveKind.READ).all()
    rig.done(moves)
    found: list[list[int]] = moves["hash"].tolist()
    return found


def kept(rig: Rig, session: int, hashes: np.ndarray) -> int:
    """Leading blocks in DRAM."""
    explained = rig.store.explain(namespace=rig.namespaces[session], hashes=hashes)
    return explained.blocks_by_tier.get("dram", 0)


def small(share: float = 0.5, paths: int = 1, **sizes: int) -> Rig:
    """No reserve, so that every slot counts."""
    limits = StoreLimits(
        reserve_slots=0, reserve_fraction=0.0, prefetch_share=share, max_waiting_leases=16, paths=paths
    )
    return Rig(**({"dram": 16, "nvme": 64, "hbm": 32} | sizes), limits=limits)


# ------------------------------------------------------------ what comes


def test_what_a_queued_request_wants_comes_before_it_asks() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(3))
    prefetch(rig, one, chain(5))
    assert len(reads(rig)) == 3
    assert rig.outcomes(one, chain(3)) == [DRAM] * 3
    assert rig.counter("prefetch_useful_bytes") == 3 * PAGE
    rig.check()


def test_what_hbm_or_dram_has_is_not_read() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(4))
    rig.write_down()
    rig.evict_dram()
    prefetch(rig, one, chain(4))
    assert reads(rig) == []
    rig.check()


def test_the_soonest_deadline_comes_first_and_who_waits_before_all() -> None:
    rig = Rig()
    one = rig.attach()
    for seed in range(4):
        on_disk(rig, one, chain(2, seed=seed))
    prefetch(rig, one, chain(2, seed=0), lease=1, in_ms=9000)
    prefetch(rig, one, chain(2, seed=1), lease=2, in_ms=100)
    prefetch(rig, one, chain(2, seed=2), lease=3, in_ms=8000)
    prefetch(rig, one, chain(1, seed=3), lease=4)  # by when is not known: after all others
    rig.acquire(one, chain(2, seed=2), lease=3)
    order = [reads(rig, 2) for _ in range(4)]
    assert order == [chain(2, seed=seed).tolist() for seed in (2, 1, 0)] + [chain(1, seed=3).tolist()]
    rig.check()


def test_a_mover_is_given_few_reads_that_nobody_waits_for() -> None:
    rig = Rig()
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(4, seed=seed))
    prefetch(rig, one, chain(4, seed=0))
    rig.acquire(one, chain(4, seed=1), lease=2)
    moves = rig.store.take_moves(0, 100, 100, 1)
    assert moves["hash"].tolist() == chain(4, seed=1).tolist() + chain(1, seed=0).tolist()
    assert len(rig.store.take_moves(0, 100, 100, 0)) == 0
    assert len(rig.store.take_moves(0, 100)) == 3
    rig.check()


def test_a_shared_prefix_comes_as_soon_as_the_first_of_its_requests_needs_it() -> None:
    """The read kept the deadline of whoever asked for it first."""
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(2))
    on_disk(rig, one, chain(2, seed=1))
    prefetch(rig, one, chain(2), lease=1, in_ms=9000)
    prefetch(rig, one, chain(2, seed=1), lease=2, in_ms=5000)
    prefetch(rig, one, chain(2), lease=3, in_ms=10)
    assert reads(rig, 2) == chain(2).tolist()
    assert reads(rig, 9) == chain(2, seed=1).tolist()  # and it comes once
    rig.check()


def test_the_same_lease_said_again_is_one_request() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4), in_ms=9000)
    prefetch(rig, one, chain(2), in_ms=10)
    assert len(rig.store._state.queued) == 1
    assert reads(rig) == chain(2).tolist()
    rig.check()


# ------------------------------------------------------------ what ends it


def test_a_cancelled_request_takes_its_reads_back() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4))
    rig.store.cancel(one, 1)
    assert reads(rig) == []
    assert rig.tier(Tier.DRAM).free_slots == 16
    assert not rig.store._state.queued.wanted.any()
    rig.check()


def test_a_cancelled_request_takes_back_nothing_that_others_want() -> None:
    """A shared prefix was no longer read when the request was cancelled that had asked for it first."""
    rig = Rig()
    one, two = rig.attach(), rig.attach()
    on_disk(rig, one, chain(5))
    prefetch(rig, one, chain(5), lease=1)
    prefetch(rig, two, chain(3), lease=1)  # of another session, and queued
    rig.acquire(one, chain(1), lease=2)  # waits
    rig.store.cancel(one, 1)
    assert reads(rig) == chain(3).tolist()
    rig.check()


def test_requests_end_with_their_session() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4))
    rig.store.lost(one, rig.now_ms)
    assert len(rig.store._state.queued) == 0
    assert reads(rig) == []
    rig.check()


def test_a_request_is_wanted_until_it_has_all_that_it_asked_for() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4))
    assert (rig.acquire(one, chain(4)).outcomes >= PROMOTING).any()
    assert len(rig.store._state.queued) == 1
    reads(rig)
    assert (rig.acquire(one, chain(4)).outcomes == DRAM).all()
    assert len(rig.store._state.queued) == 0
    rig.check()


def test_more_requests_than_a_session_may_have_let_go_of_the_furthest() -> None:
    rig = small()
    one = rig.attach()
    on_disk(rig, one, chain(1))
    for lease in range(20):
        prefetch(rig, one, chain(1), lease=lease, in_ms=1000 * (20 - lease))
    assert sorted(rig.store._state.queued.of_session(one)) == list(range(4, 20))
    rig.check()


# ------------------------------------------------------------ room


def test_prefetch_takes_no_slot_of_what_is_nowhere_else() -> None:
    rig = small(dram=4, share=1.0)
    one = rig.attach()
    on_disk(rig, one, chain(4))
    rig.write_through(one, chain(3, seed=1))  # not written down
    prefetch(rig, one, chain(4))
    moves = rig.store.take_moves(0, 10)
    assert (moves["kind"] == MoveKind.READ).sum() == 1  # the one free slot
    rig.check()


def test_prefetch_takes_slots_of_what_storage_has_too_and_nobody_wants_sooner() -> None:
    """With DRAM full, as it is most of the time, nothing was ever read ahead."""
    rig = small(dram=6, share=1.0)
    one = rig.attach()
    on_disk(rig, one, chain(6))
    in_dram(rig, one, chain(2, seed=1))
    in_dram(rig, one, chain(2, seed=2))
    in_dram(rig, one, chain(2, seed=3))
    prefetch(rig, one, chain(2, seed=2), lease=2, in_ms=10)  # wanted sooner: stays
    prefetch(rig, one, chain(2, seed=3), lease=3, in_ms=90_000)  # wanted later: may go
    prefetch(rig, one, chain(6), lease=1, in_ms=1000)
    assert len(reads(rig)) == 4
    assert [kept(rig, one, chain(2, seed=seed)) for seed in (1, 2, 3)] == [0, 2, 0]
    rig.check()


def test_what_was_read_ahead_takes_a_part_of_dram_until_it_is_used() -> None:
    """More waiting requests than DRAM holds pushed out each other's blocks before they were used."""
    rig = small(dram=8)
    one = rig.attach()
    for seed in range(4):
        on_disk(rig, one, chain(3, seed=seed))
    for seed in range(4):
        prefetch(rig, one, chain(3, seed=seed), lease=seed, in_ms=1000 * seed + 1)
    assert reads(rig) == chain(3).tolist() + chain(1, seed=1).tolist()
    assert reads(rig) == []
    assert rig.outcomes(one, chain(3)) == [DRAM] * 3  # used: three more may come
    rig.store.tick(rig.now_ms)
    assert len(reads(rig)) == 3
    assert rig.counter("prefetch_wasted_bytes") == 0
    rig.check()


def test_nothing_is_read_ahead_where_no_part_of_dram_may_be_used() -> None:
    rig = small(share=0.0)
    one = rig.attach()
    on_disk(rig, one, chain(3))
    prefetch(rig, one, chain(3))
    assert reads(rig) == []
    assert len(rig.store._state.queued) == 1  # eviction still knows of it
    rig.check()


def test_an_acquire_goes_on_where_prefetch_has_filled_dram() -> None:
    """What was read ahead never keeps a running request from its blocks."""
    rig = small(dram=8, share=1.0)
    one = rig.attach()
    on_disk(rig, one, chain(8))
    on_disk(rig, one, chain(4, seed=1))
    prefetch(rig, one, chain(8), lease=1)
    assert len(reads(rig)) == 8
    assert (rig.acquire(one, chain(4, seed=1), lease=2).outcomes == PROMOTING).all()
    assert reads(rig) == chain(4, seed=1).tolist()
    assert rig.counter("prefetch_wasted_bytes") == 4 * PAGE
    rig.check()


def test_room_for_what_will_be_written_spares_what_was_read_ahead() -> None:
    """A session has up to a quarter of its HBM's pages of room in hand: in a small DRAM that pushed out what had just
    been read for requests that were about to ask, and it was read again."""
    rig = small(dram=8)
    one = rig.attach()
    on_disk(rig, one, chain(4))
    in_dram(rig, one, chain(4, seed=1))
    prefetch(rig, one, chain(4), lease=1)
    assert reads(rig) == chain(4).tolist()
    assert len(rig.room(one, 8).dram_slots) == 4
    assert (kept(rig, one, chain(4)), kept(rig, one, chain(4, seed=1))) == (4, 0)
    assert rig.outcomes(one, chain(4)) == [DRAM] * 4
    assert rig.counter("prefetch_wasted_bytes") == 0
    rig.check()


def test_room_for_what_will_be_written_spares_what_the_first_that_waits_needs_next() -> None:
    """What had come for a request that asked and waits, and was about to ask again, was pushed out and read again; when
    its last blocks came the first went, so it waited for the disk behind the next."""
    rig = small(dram=8)
    one = rig.attach()
    for lease in (1, 2):
        on_disk(rig, one, chain(4, seed=lease))
    for lease in (1, 2):
        assert (rig.acquire(one, chain(4, seed=lease), lease=lease).outcomes == PROMOTING).all()
    assert len(reads(rig)) == 8
    assert len(rig.room(one, 8).dram_slots) == 4  # of the second: what is computed meanwhile finds room
    assert (kept(rig, one, chain(4, seed=1)), kept(rig, one, chain(4, seed=2))) == (4, 0)
    rig.check()


def test_room_for_what_will_be_written_is_found_beside_all_that_is_spared() -> None:
    """What was read ahead and what those want that have asked were spared up to half of DRAM each: where a queue stood
    still nothing was written until it went on."""
    rig = small()
    one = rig.attach()
    prompts = [chain(blocks, seed=blocks) for blocks in (3, 4, 8)]
    for prompt in prompts:
        on_disk(rig, one, prompt)
    for lease, prompt in enumerate(prompts[:2]):
        assert (rig.acquire(one, prompt, lease=lease).outcomes == PROMOTING).all()
    prefetch(rig, one, prompts[2], lease=3)
    assert len(reads(rig)) == 15
    assert len(rig.room(one, 8).dram_slots) == 1 + 4  # the free one, and those of the second that asked
    assert [kept(rig, one, prompt) for prompt in prompts] == [3, 0, 8]
    rig.check()


def test_what_came_ahead_for_one_that_has_asked_is_not_pushed_out_for_one_that_asks_later() -> None:
    """A request whose blocks were all on their way when it asked kept its deadline: those that asked after it had
    sooner ones, took its slots before it had used them, and it was served last of all."""
    rig = small(dram=8, share=1.0)
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(6, seed=seed))
    prefetch(rig, one, chain(6), lease=1, in_ms=100)
    assert (rig.acquire(one, chain(6), lease=1).outcomes == PROMOTING).all()
    assert reads(rig) == chain(6).tolist()
    rig.acquire(one, chain(6, seed=1), lease=2)
    assert kept(rig, one, chain(6)) == 6
    assert rig.outcomes(one, chain(6)) == [DRAM] * 6
    rig.check()


def test_what_is_there_for_one_that_lacks_hbm_alone_is_not_pushed_out_for_one_that_asks_later() -> None:
    """As above: it had asked, found all of it in DRAM, and waited for HBM with the deadline that it had announced."""
    rig = small(dram=8, hbm=8, share=1.0)
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(6, seed=seed))
    busy = rig.acquire(one, chain(4, seed=9), lease=9)
    assert (busy.outcomes == Outcome.MISS).all()
    prefetch(rig, one, chain(6), lease=1, in_ms=100)
    assert reads(rig) == chain(6).tolist()
    lacking = rig.acquire(one, chain(6), lease=1)
    assert Outcome.NO_SLOT in lacking.outcomes
    rig.step(one, hbm=lacking.hbm_slots, dram=lacking.dram_slots)
    rig.acquire(one, chain(6, seed=1), lease=2)
    assert kept(rig, one, chain(6)) == 6
    rig.check()


def test_reads_that_are_queued_ahead_make_way_for_one_that_has_asked() -> None:
    """They kept their slots: who asked was begun with what was left, and pushed out what had been read for others."""
    rig = small(dram=8, share=1.0)
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(6, seed=seed))
    prefetch(rig, one, chain(6), lease=1, in_ms=100)
    first = rig.store.take_moves(0, 1000, early=2)
    assert first["hash"].tolist() == chain(6)[:2].tolist()
    asked = rig.acquire(one, chain(4, seed=1), lease=2)
    assert (asked.outcomes == PROMOTING).all()
    rig.done(first)
    assert sorted(reads(rig, limit=4)) == sorted(chain(4, seed=1).tolist())
    assert reads(rig) == chain(4)[2:].tolist()
    assert kept(rig, one, chain(6)) == 4
    given = rig.acquire(one, chain(4, seed=1), lease=2)
    assert given.complete
    rig.step(one, hbm=given.hbm_slots, dram=given.dram_slots)
    rig.store.take_changed()
    assert reads(rig) == chain(6)[4:].tolist()
    assert rig.counter("prefetch_wasted_bytes") == 0
    rig.check()


def test_what_is_wanted_sooner_takes_the_room_of_reads_that_nobody_has_begun() -> None:
    """It pushed out the first blocks of a request, which had come, while the last of them were still to be read."""
    rig = small(dram=12, share=1.0)
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(6, seed=seed))
    assert len(rig.room(one, 4).dram_slots) == 4
    prefetch(rig, one, chain(6), lease=1, in_ms=200)
    assert len(reads(rig, limit=2)) == 2
    prefetch(rig, one, chain(6, seed=1), lease=2, in_ms=100)
    assert sorted(reads(rig, limit=6)) == sorted(chain(6, seed=1).tolist())
    assert kept(rig, one, chain(6)) == 2
    assert rig.counter("prefetch_wasted_bytes") == 0
    rig.check()


def test_the_slot_of_a_read_that_was_undone_may_be_read_into_from_another_disk() -> None:
    """The first disk's mover still had the slot in its queue: it was told to read the other disk's block, which it does
    not have, and the slot was held for ever, as the hold was the other's.
    """
    for cancelled in (True, False):
        rig = small(dram=12, nvme=16, share=1.0, paths=2)
        rig.store.add_extent(tier=Tier.NVME, device=1, nbytes=32 * PAGE)
        one = rig.attach()
        for path in range(2):
            rig.store.take_moves(path, 0)  # it has a mover
            on_disk(rig, one, chain(8, seed=path), path=path)
        assert len(rig.room(one, 4).dram_slots) == 4
        prefetch(rig, one, chain(8), lease=1, in_ms=9000)
        if cancelled:
            rig.store.cancel(one, 1)
        prefetch(rig, one, chain(4, seed=1), lease=2, in_ms=100)
        rig.store.tick(rig.now_ms)  # else a search that found no room waits for it
        for path, expected in ((0, [] if cancelled else chain(4)), (1, chain(4, seed=1))):
            moves = rig.store.take_moves(path, 1000)
            assert sorted(moves["hash"].tolist()) == sorted(np.array(expected).tolist())
            rig.done(moves, path=path)
        assert rig.tier(Tier.DRAM).held_slots == 4, "what the engine has in hand"
        rig.check()


def test_reads_that_make_way_again_and_again_do_not_pile_up() -> None:
    """What was undone stayed in its mover's queue until that came to it: never, while others are always sooner."""
    rig = small(dram=8, share=1.0)
    one = rig.attach()
    for seed in range(2):
        on_disk(rig, one, chain(6, seed=seed))
    prefetch(rig, one, chain(6), lease=1, in_ms=9000)
    for _ in range(50):
        assert (rig.acquire(one, chain(4, seed=1), lease=2).outcomes == PROMOTING).all()
        rig.done(rig.store.take_moves(0, 4))
        given = rig.acquire(one, chain(4, seed=1), lease=2)
        assert given.complete
        rig.step(one, hbm=given.hbm_slots, dram=given.dram_slots)
        rig.evict_hbm()
        rig.evict_dram()
        rig.store.tick(rig.now_ms)
    (path,) = rig.store._moving.promoting._paths
    assert sum(len(slots) for _, _, slots in path.prefetched) <= 8
    rig.check()


def test_what_a_queued_request_loses_in_hbm_is_read_before_what_others_want_later() -> None:
    """It was looked at once, when HBM had its blocks: those of requests behind it were read, and made way for it."""
    rig = small(dram=12, hbm=8, share=1.0)
    one = rig.attach()
    on_disk(rig, one, chain(4, seed=1))
    rig.write_through(one, chain(4))
    rig.write_down()
    rig.evict_dram()
    prefetch(rig, one, chain(4), lease=1, in_ms=100)
    prefetch(rig, one, chain(4, seed=1), lease=2, in_ms=200)
    rig.acquire(one, chain(8, seed=2), lease=3)
    rig.store.take_changed()
    assert sorted(reads(rig, limit=4)) == sorted(chain(4).tolist())
    assert sorted(reads(rig)) == sorted(chain(4, seed=1).tolist())
    rig.check()


def test_requests_of_another_slot_size_do_not_wait_for_room_of_this_one() -> None:
    rig = small(dram=0, share=1.0)
    rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=8 * 2 * PAGE, slot_bytes=2 * PAGE)
    for _ in range(2):
        rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=4 * PAGE)
    one, two = rig.attach(), rig.attach(slot_bytes=2 * PAGE)
    on_disk(rig, one, chain(4))
    rig.store.add_extent(tier=Tier.NVME, device=0, nbytes=8 * 3 * PAGE)
    on_disk(rig, two, chain(2, seed=1))
    rig.write_through(one, chain(4, seed=2))  # fills its extent, and storage has none of it
    prefetch(rig, one, chain(4), lease=1, in_ms=1)
    prefetch(rig, two, chain(2, seed=1), lease=1, in_ms=1000)
    moves = rig.store.take_moves(0, 100)
    assert moves["hash"][moves["kind"] == MoveKind.READ].tolist() == chain(2, seed=1).tolist()
    rig.check()


def test_requests_that_ended_do_not_pile_up_behind_one_that_finds_no_room() -> None:
    rig = small(share=0.0)
    one = rig.attach()
    on_disk(rig, one, chain(3))
    prefetch(rig, one, chain(3), lease=1, in_ms=1)
    for _ in range(500):
        prefetch(rig, one, chain(3), lease=2, in_ms=100)
    (heap,) = rig.store.prefetching._pending.values()
    assert len(heap) < 100
    rig.check()


def test_a_search_that_found_no_room_waits_for_the_background() -> None:
    rig = small(dram=4, share=1.0)
    one = rig.attach()
    in_dram(rig, one, chain(4, seed=1))
    rig.write_through(one, chain(4, seed=2))
    on_disk_later = chain(2)
    rig.write_down()
    held = rig.acquire(one, chain(4, seed=2), lease=9)
    assert (held.outcomes == HBM).all()
    on_disk(rig, one, on_disk_later)
    rig.write_through(one, chain(4, seed=3))
    prefetch(rig, one, on_disk_later)
    assert len(rig.store.prefetching._stuck) == 1
    rig.write_down()  # now all of DRAM is on disk as well
    rig.store.take_changed()
    assert rig.counter("prefetches") == 0
    rig.store.tick(rig.now_ms)
    assert rig.counter("prefetches") == 2
    rig.check()


# ------------------------------------------------------------ eviction knows of queued requests


@pytest.mark.parametrize("sizes", [{"dram": 4, "nvme": 0, "hbm": 32}, {"dram": 0, "nvme": 0, "hbm": 4}])
def test_what_queued_requests_want_goes_last_and_the_furthest_first(sizes: dict[str, int]) -> None:
    rig = Rig(**sizes, limits=StoreLimits(reserve_slots=0, reserve_fraction=0.0))
    one = rig.attach()
    for seed in range(4):
        rig.write_through(one, chain(1, seed=seed)) if sizes["dram"] else rig.fill(one, chain(1, seed=seed))
    if sizes["dram"]:
        rig.evict_hbm()
    prefetch(rig, one, chain(1, seed=0), lease=1, in_ms=500)
    prefetch(rig, one, chain(1, seed=1), lease=2, in_ms=900)

    def there() -> list[int]:
        explained = [
            rig.store.explain(namespace=rig.namespaces[one], hashes=chain(1, seed=s)) for s in range(4)
        ]
        return [seed for seed, found in enumerate(explained) if found.cached_blocks]

    def another(seed: int) -> None:
        if sizes["dram"]:
            rig.room(one, 1)
        else:
            rig.acquire(one, chain(1, seed=seed), lease=seed)

    for number, left in enumerate(([0, 1, 3], [0, 1], [0], [])):
        another(100 + number)
        assert there() == left
    rig.check()


def test_a_victim_chosen_ahead_is_spared_once_a_request_wants_it() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0, limits=StoreLimits(reserve_slots=0, reserve_fraction=0.0))
    one = rig.attach()
    for seed in range(4):
        rig.fill(one, chain(1, seed=seed))
    rig.acquire(one, chain(1, seed=50), lease=50)  # takes 0; 1, 2 and 3 are next
    prefetch(rig, one, chain(1, seed=1), lease=1)
    rig.acquire(one, chain(1, seed=51), lease=51)
    assert rig.outcomes(one, chain(1, seed=1)) == [HBM]
    rig.check()


# ------------------------------------------------------------ counts


def test_late_reads_are_counted_as_such() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4))
    moves = rig.store.take_moves(0, 1)
    rig.done(moves)
    under_way = rig.store.take_moves(0, 1)
    rig.acquire(one, chain(4))
    rig.done(under_way)
    assert rig.counter("prefetch_late_bytes") == 3 * PAGE  # one under way, two still queued
    reads(rig)
    rig.acquire(one, chain(4))
    assert rig.counter("prefetch_useful_bytes") == PAGE
    assert rig.counter("prefetch_wasted_bytes") == 0
    assert rig.store._state.early.unused(PAGE) == 0
    rig.check()


def test_reads_that_nobody_used_are_wasted_and_those_undone_are_nothing() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    prefetch(rig, one, chain(4))
    rig.done(rig.store.take_moves(0, 1))
    rig.done(rig.store.take_moves(0, 1), MoveStatus.CANCELLED)
    rig.store.cancel(one, 1)
    assert rig.counter("prefetch_wasted_bytes") == 0
    rig.evict_dram()
    assert rig.counter("prefetch_wasted_bytes") == PAGE
    assert rig.store._state.early.unused(PAGE) == 0
    rig.check()


def test_times_without_a_deadline_are_after_all_others() -> None:
    assert Rig().now_ms < NO_DEADLINE_MS
