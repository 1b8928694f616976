"""Pins have owners: each takes back its own, and a block stays pinned while one of them is left."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgument
from kvstore.layout import NONE
from tests.kvstore.store_rig import Rig, chain


def pinned(rig: Rig) -> list[tuple[str, int, int]]:
    return [(pin.owner, pin.blocks, pin.until_ms - rig.now_ms) for pin in rig.store.pins.owners()]


def evicts(rig: Rig, session: int, lease: int) -> int:
    """How many of two blocks that are wanted find a slot; they are given back."""
    grant = rig.acquire(session, chain(2, seed=9), lease=lease)
    given = grant.hbm_slots[grant.hbm_slots != NONE]
    rig.step(session, hbm=given)
    return len(given)


def pinned_rig() -> tuple[Rig, int]:
    rig = Rig(hbm=2, dram=0, nvme=0)
    session = rig.attach()
    rig.fill(session, chain(2))
    for owner, ttl_ms in (("ops", 1000), ("team", 5000)):
        rig.store.pin(
            now_ms=rig.now_ms, namespace=rig.namespaces[session], hashes=chain(2), ttl_ms=ttl_ms, owner=owner
        )
    return rig, session


def test_each_owner_is_named_with_its_blocks_and_its_last_end() -> None:
    rig, session = pinned_rig()
    rig.store.pin(
        now_ms=rig.now_ms, namespace=rig.namespaces[session], hashes=chain(1), ttl_ms=9000, owner="ops"
    )
    assert pinned(rig) == [("ops", 2, 9000), ("team", 2, 5000)]


def test_an_owner_takes_back_its_own_pins_alone() -> None:
    """Whoever took a pin back took everybody's."""
    rig, session = pinned_rig()
    namespace = rig.namespaces[session]
    assert rig.store.unpin(namespace=namespace, hashes=chain(2), owner="ops") == 2
    assert rig.store.unpin(namespace=namespace, hashes=chain(2), owner="ops") == 0
    assert pinned(rig) == [("team", 2, 5000)]
    assert evicts(rig, session, 2) == 0
    assert rig.store.unpin(namespace=namespace, hashes=chain(2)) == 2
    assert pinned(rig) == []
    assert evicts(rig, session, 3) == 2
    rig.check()


def test_a_pin_that_ends_leaves_the_others() -> None:
    rig, session = pinned_rig()
    rig.store.tick(rig.now_ms + 2000)
    assert [owner for owner, *_ in pinned(rig)] == ["team"]
    assert evicts(rig, session, 2) == 0
    rig.store.tick(rig.now_ms + 6000)
    assert pinned(rig) == []
    assert evicts(rig, session, 3) == 2
    rig.check()


def test_a_name_is_short_and_printable() -> None:
    rig, session = pinned_rig()
    for owner in ("x" * 65, "a\nb"):
        with pytest.raises(InvalidArgument, match="an owner is a name"):
            rig.store.pin(
                now_ms=rig.now_ms,
                namespace=rig.namespaces[session],
                hashes=chain(1),
                ttl_ms=1,
                owner=owner,
            )
    assert [owner for owner, *_ in pinned(rig)] == ["ops", "team"]
