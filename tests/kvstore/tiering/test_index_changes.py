"""What the durable index is told: each change once and again after a kill, and coarsely when blocks were used."""

from __future__ import annotations

import numpy as np

from kvstore.layout import Tier
from kvstore.moves import U32
from kvstore.tables.prebuilt import Blocks
from kvstore.tiering.index_changes import GROUP_SLOTS
from kvstore.tiering.loading import LoadSlab
from tests.kvstore.store_rig import PAGE, Rig, chain

PASS_MS = 600_000


def told(rig: Rig) -> set[int]:
    """Slots that are taken now."""
    changes = rig.store.index_changes.take(0, 1000)
    return set(changes.published["slot"].tolist()) | set(changes.freed.tolist())


def written(rig: Rig, session: int, count: int, *, seed: int = 0) -> None:
    rig.write_through(session, chain(count, seed=seed))
    rig.write_down()


def settle(rig: Rig, index: dict[int, np.void] | None = None) -> U32:
    """The index (NVME_ENTRY by slot) has all that there is to tell."""
    changes = rig.store.index_changes.take(0, 1000)
    slots = np.concatenate((changes.published["slot"], changes.freed))
    rig.store.index_changes.committed(slots)
    if index is not None:
        index.update(zip(changes.published["slot"].tolist(), changes.published, strict=True))
    return slots


def test_what_was_taken_and_not_committed_is_told_again_after_a_kill() -> None:
    """A daemon that died between taking a change and committing it left an index that never learned of it."""
    rig = Rig()
    one = rig.attach()
    written(rig, one, 3)
    settle(rig)
    written(rig, one, 2, seed=1)
    taken = told(rig)
    assert len(taken) == 2
    rig.recover()
    assert told(rig) >= taken
    rig.store.index_changes.put_back(0)
    assert told(rig) >= taken, "as after a commit that failed"
    settle(rig)


def test_what_changes_while_it_is_being_committed_is_told_again() -> None:
    rig = Rig()
    one = rig.attach()
    written(rig, one, 2)
    changes = rig.store.index_changes.take(0, 1000)
    slots = changes.published["slot"]
    rig.evict_hbm()
    rig.evict_dram()
    rig.store.clear(None)
    rig.store.index_changes.committed(slots)
    assert rig.store.index_changes.take(0, 1000).freed.tolist() == slots.tolist()


def test_few_are_taken_at_a_time_and_all_of_them_in_the_end() -> None:
    rig = Rig()
    one = rig.attach()
    written(rig, one, 10)
    seen: list[int] = []
    while len(some := rig.store.index_changes.take(0, 4).published["slot"]):
        assert len(some) <= 4
        rig.store.index_changes.committed(some)
        seen += some.tolist()
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 10


def test_a_use_is_no_write_and_comes_with_the_next_one_of_its_group() -> None:
    rig = Rig()
    one = rig.attach()
    written(rig, one, 4)
    settle(rig)
    rig.outcomes(one, chain(4))
    rig.store.tick(rig.now_ms)
    assert len(settle(rig)) == 0
    written(rig, one, 1, seed=5)
    changes = rig.store.index_changes.take(0, 1000)
    assert len(changes.published) == 5
    columns = rig.store._state.columns
    rows = rig.store._state.table.locate(chain(4), rig.namespaces[one])
    assert set(columns.touch[rows].tolist()) <= set(changes.published["touch"].tolist())


def test_a_path_is_told_of_its_own_slots_alone() -> None:
    """Where extents of two paths met, one's index was given the other's blocks, in place of its own."""
    rig = Rig()
    one = rig.attach()
    written(rig, one, 2)
    hashes = chain(3, seed=7)
    blocks = Blocks(
        hashes=hashes,
        parents=np.zeros((3, 2), dtype=np.uint64),
        namespaces=np.full(3, rig.namespaces[one], dtype=np.uint32),
        depths=np.arange(3, dtype=np.uint32),
        touches=np.zeros(3, dtype=np.uint64),
        slots=np.arange(3, dtype=np.uint32),
        generations=np.zeros(3, dtype=np.uint32),
    )
    rig.load(1, [LoadSlab(slab=1, nbytes=8 * 2 * PAGE, slot_bytes=PAGE)], {1: blocks})
    settle(rig)
    theirs = rig.store._state.columns.nvme[rig.store._state.table.locate(hashes, rig.namespaces[one])]
    assert theirs.max() < GROUP_SLOTS, "in one group with the first path's"
    rig.now_ms += 1000
    rig.outcomes(one, hashes)
    written(rig, one, 1, seed=5)
    assert not set(settle(rig).tolist()) & set(theirs.tolist())


def test_a_slow_pass_tells_what_was_used_and_nothing_else() -> None:
    rig = Rig()
    one = rig.attach()
    written(rig, one, 4)
    written(rig, one, 4, seed=1)
    settle(rig)
    rig.now_ms += 1000
    rig.outcomes(one, chain(4))
    rig.store.tick(rig.now_ms + PASS_MS // 2)
    assert len(settle(rig)) == 0, "not so soon"
    rig.now_ms += PASS_MS + 2000
    rig.store.tick(rig.now_ms)
    slots = settle(rig)
    used = rig.store._state.columns.nvme[rig.store._state.table.locate(chain(4), rig.namespaces[one])]
    assert sorted(slots.tolist()) == sorted(used.tolist())
    rig.store.tick(rig.now_ms + 2 * PASS_MS)
    assert len(settle(rig)) == 0, "once is enough"


def test_a_pass_is_bounded() -> None:
    rig = Rig()
    changes = rig.store.index_changes
    groups = -(-len(rig.store._state.nvme) // GROUP_SLOTS)
    for _ in range(3 * groups):
        changes.tick()  # the clock stands still: one turn
    assert changes._pass_hand <= 128


def test_a_restart_evicts_about_what_it_would_have_without_one() -> None:
    """What was used last before a restart was evicted first after it: the index knew only when blocks were written."""
    rig = Rig()
    one = rig.attach()
    index: dict[int, np.void] = {}
    for seed in range(4):
        written(rig, one, 4, seed=seed)
        settle(rig, index)
        rig.now_ms += 1000
    rig.now_ms += 1000
    rig.outcomes(one, chain(4, seed=0))  # the oldest is used again
    rig.now_ms += PASS_MS + 2000
    rig.store.tick(rig.now_ms)
    settle(rig, index)
    entries = np.array([index[slot] for slot in sorted(index)])
    other = Rig(nvme=0)
    two = other.attach()
    namespace = other.namespaces[two]
    other.now_ms = rig.now_ms
    blocks = Blocks(
        hashes=entries["hash"],
        parents=entries["parent"],
        namespaces=np.full(len(entries), namespace, dtype=np.uint32),
        depths=entries["depth"],
        touches=entries["touch"],
        slots=entries["slot"],
        generations=entries["generation"],
    )
    other.store.tick(other.now_ms)
    other.load(0, [LoadSlab(slab=1, nbytes=16 * 2 * PAGE, slot_bytes=PAGE)], {1: blocks})
    other.write_through(two, chain(8, seed=9))
    other.write_down()
    left = [
        int((other.store._state.table.locate(chain(4, seed=seed), namespace) != 0xFFFFFFFF).sum())
        for seed in range(4)
    ]
    assert left[0] == 4
    assert left[1] + left[2] < 8
    assert other.store.stats().tiers[Tier.NVME].sealed_slots <= 16
