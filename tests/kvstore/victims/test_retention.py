"""What engines say of the next use of blocks: an order of eviction that outranks policies and pins nothing."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.base import Stop
from eviction.factory import policy_factory
from kvstore.errors import FailedPrecondition, InvalidArgument, NotFound
from kvstore.layout import Tier
from kvstore.moves import U64
from tests.kvstore.store_rig import PAGE, Rig
from tests.kvstore.store_rig import chain as prompt


def retain(
    rig: Rig,
    session: int,
    hashes: U64,
    priority: int,
    ttl_ms: int,
    *,
    first: int = 0,
    last: int | None = None,
) -> None:
    rig.store.hints.retain(
        now_ms=rig.now_ms,
        session=session,
        namespace=rig.namespaces[session],
        hashes=hashes,
        first=first,
        last=len(hashes) if last is None else last,
        stop=Stop.UNKNOWN,
        priority=priority,
        ttl_ms=ttl_ms,
    )


def cached(rig: Rig, session: int, hashes: U64) -> int:
    """Leading blocks that any tier has."""
    rows = rig.store._state.table.locate(hashes, rig.namespaces[session])
    sealed = rig.store._state.table.sealed(rows)
    return len(sealed) if sealed.all() else int(sealed.argmin())


@pytest.fixture(params=["lru", "hazard"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Eight blocks of DRAM, by the store's own order and by a policy."""
    rig = Rig(hbm=16, dram=8, nvme=0)
    if request.param != "lru":
        rig.store.hints.rankings.rank(Tier.DRAM, request.param, policy_factory(request.param), 8 * PAGE)
    return rig


def write(rig: Rig, session: int, *seeds: int, length: int = 2) -> None:
    for seed in seeds:
        rig.write_through(session, prompt(length, seed=seed))
    rig.evict_hbm()


def test_what_is_retained_outlives_what_was_used_later(rig: Rig) -> None:
    session = rig.attach()
    write(rig, session, 1)
    retain(rig, session, prompt(2, seed=1), 1, 60_000)
    write(rig, session, 2, 3, 4, 5, 6)
    assert cached(rig, session, prompt(2, seed=1)) == 2
    assert cached(rig, session, prompt(2, seed=2)) == 0
    rig.now_ms += 60_001
    write(rig, session, 7, 8, 9, 10)
    assert cached(rig, session, prompt(2, seed=1)) == 0, "its time is over"
    rig.check()


def test_of_more_than_fits_the_higher_priority_stays_and_nothing_is_pinned(rig: Rig) -> None:
    session = rig.attach()
    for seed, priority in ((1, 50), (2, 10), (3, 90), (4, 10)):
        write(rig, session, seed)
        retain(rig, session, prompt(2, seed=seed), priority, 60_000 + 10_000 * seed)
    write(rig, session, 5)
    assert [cached(rig, session, prompt(2, seed=seed)) > 0 for seed in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]
    write(rig, session, 6, 7, 8, 9, length=8)
    assert cached(rig, session, prompt(2, seed=3)) == 0, "nothing is pinned"
    rig.check()


def test_a_range_takes_its_ancestors_along_and_leaves_the_rest(rig: Rig) -> None:
    session = rig.attach()
    write(rig, session, 1, length=6)
    retain(rig, session, prompt(6, seed=1), 5, 60_000, first=2, last=4)
    write(rig, session, 2, 3, 4)
    assert cached(rig, session, prompt(6, seed=1)) == 4
    retain(rig, session, prompt(6, seed=1), 0, 0)
    write(rig, session, 5, 6, 7)
    assert cached(rig, session, prompt(6, seed=1)) < 4, "taken back"


def test_a_row_with_another_block_is_not_retained() -> None:
    rig = Rig(hbm=4, dram=4, nvme=0, rows=4)
    session = rig.attach()
    write(rig, session, 1)
    retain(rig, session, prompt(2, seed=1), 9, 60_000)
    rig.store.clear(None)
    rig.store.tick(rig.now_ms)
    write(rig, session, 2, 3)
    assert not rig.store._state.retention.holds(np.arange(4, dtype=np.uint32), rig.now_ms).any()


def test_what_is_said_wrongly_is_refused() -> None:
    rig = Rig()
    session, hashes = rig.attach(), prompt(2)
    with pytest.raises(InvalidArgument, match="priority"):
        retain(rig, session, hashes, 101, 1)
    with pytest.raises(InvalidArgument, match="blocks 2 to 1"):
        retain(rig, session, hashes, 1, 1, first=2, last=1)
    with pytest.raises(InvalidArgument, match="blocks 0 to 3"):
        retain(rig, session, hashes, 1, 1, last=3)
    rig.namespaces[7] = 0
    with pytest.raises(NotFound):
        retain(rig, 7, hashes, 1, 1)
    rig.namespaces[session] = 3
    with pytest.raises(FailedPrecondition, match="namespace 3"):
        retain(rig, session, hashes, 1, 1)
