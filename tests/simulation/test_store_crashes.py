"""The crash table, write by write: one fixed story, in which the daemon dies at each fault point in turn.

After each death the world's own check holds (nothing wrong is a hit, nothing is taken from a living holder, nothing
leaks), the story goes on to its end, and when all processes are gone every slot is free or holds a complete block.
"""

from __future__ import annotations

import pytest

from kvstore.layout import Tier
from kvstore.moves import MoveStatus
from tests.simulation.world import World
from tests.support.fault_points import fault_points

_PARTS = 12


def _story(world: World) -> None:
    """Cold fill, write-through, write-behind, eviction, disk hit, load, aborts, deaths: every transition once."""

    def client(number: int):  # type: ignore[no-untyped-def]
        for each in list(world.clients.values()):
            if not each.attached:
                world.resume(each)
        some = list(world.clients.values())
        return some[number % len(some)]

    acts = [
        lambda: world.attach(0, 0),
        lambda: world.attach(0, 0),
        lambda: world.acquire(client(0), 0, 6, reserve=1),
        lambda: world.acquire(client(1), 0, 4),
        lambda: world.seal(client(0), 4, twice=True),
        lambda: world.seal(client(0), 4),
        lambda: world.want(client(0), 1, 6),
        lambda: world.top_up(client(0)),
        lambda: world.store_down(client(0), 6, release=True),
        lambda: world.acquire(client(1), 0, 6, stale_release=True),
        lambda: world.take_moves(4),
        lambda: world.finish_moves(3),
        lambda: world.take_moves(8),
        lambda: world.finish_moves(8),
        lambda: world.release(client(0), 30),
        lambda: world.release(client(1), 30),
        lambda: world.acquire(client(0), 1, 8),  # evicts from HBM
        lambda: world.seal(client(0), 8),
        lambda: world.want(client(0), 0, 8),
        lambda: world.top_up(client(0)),
        lambda: world.store_down(client(0), 8, release=True),
        lambda: world.release(client(0), 30),
        lambda: world.acquire(client(1), 2, 8),
        lambda: world.release(client(1), 30),
        lambda: world.take_moves(20),
        lambda: world.finish_moves(20),
        lambda: world.attach(1, None),
        lambda: world.want(client(2), 0, 6),  # another class: takes and drains DRAM extents
        lambda: world.top_up(client(2)),
        world.tick,
        lambda: world.top_up(client(2)),
        lambda: world.seal(client(2), 3),
        lambda: world.evict(Tier.HBM),
        lambda: world.evict(Tier.DRAM),
        lambda: world.acquire(client(1), 0, 6),  # disk hits
        lambda: world.acquire(client(1), 1, 8),
        lambda: world.take_moves(20),
        lambda: world.finish_moves(6),
        lambda: world.finish_moves(1, MoveStatus.CORRUPT),
        lambda: world.finish_moves(1, MoveStatus.IO_ERROR),
        lambda: world.finish_moves(20),
        lambda: world.acquire(client(1), 1, 8),
        lambda: world.load(client(1), 6),
        lambda: world.report(client(1), 1, 4),  # blocks that it holds, of which others are sealed too
        lambda: world.acquire(client(1), 0, 6),
        lambda: world.prefetch(client(1), 1, 8),
        lambda: world.take_moves(2),
        lambda: world.lose(client(1)),
        lambda: world.kill(client(0)),
        world.tick,
        world.mover_ended,
        lambda: world.release(client(0), 30),
        lambda: world.acquire(client(0), 3, 8),
        lambda: world.seal(client(0), 4),
        lambda: world.find(client(0), 3),  # of which some are there, and some are being filled
        world.clear,
    ]
    for act in acts:
        if not world.clients and act not in acts[:2]:
            world.attach(0, 0)
        act()
        if world.crashes:  # before that every run is the same
            world.check()


def _end(world: World) -> None:
    """Every process goes away: nothing may be held, filling or reserved."""
    world.fault_in = None
    for client in list(world.clients.values()):
        world.kill(client)
    world.mover_ended()
    world.check()
    for tier in world.store.stats().tiers:
        assert tier.held_slots == 0, f"{tier.tier.name} leaks"
        assert tier.filling_slots == 0, f"{tier.tier.name} leaks"
        if tier.tier is not Tier.NVME:
            assert tier.free_slots + tier.sealed_slots == tier.slots


def _points() -> list[str]:
    world = World(1)
    world.points.clear()
    _story(world)
    return list(world.points)


def test_the_story_passes_every_fault_point() -> None:
    """A write that no death is tried at would be a hole in the crash table."""
    missing = set(fault_points().store) - set(_points())
    assert not missing


@pytest.mark.parametrize("part", range(_PARTS))
def test_the_daemon_dies_at_each_point(part: int) -> None:
    """Between any two writes, and once more while it recovers."""
    for point in range(part, len(_points()), _PARTS):
        world = World(1)
        world.fault_in = point
        world.die_again_in = point % 7
        _story(world)
        assert world.crashes == 1
        _end(world)
