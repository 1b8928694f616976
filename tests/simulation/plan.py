"""What histories do: sizes and odds of each plan. A seed is of one plan, by its number."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config import Durability
from tests.simulation.shape import Death, Shape

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a scenario does."""

    shape: Shape
    deaths: tuple[tuple[Death, float], ...] = (
        (Death.MOVER, 1.0),
        (Death.DAEMON, 2.0),
        (Death.EVERYTHING, 1.0),
        (Death.POWER, 3.0),
    )
    """Who dies, by weight."""
    points_between: int = 500
    """Points from one death to the next, about."""
    double_deaths: float = 0.3
    """Odds that somebody dies again while what died starts."""
    asides: float = 0.5
    """Odds that an operation of the disk is looked at aside, twice then."""
    clears: float = 0.002
    flushes: float = 0.02
    stops: float = 0.001
    """Odds, at each step, that the daemon is ended in order."""
    resizes: float = 0.0
    """Odds, at each step, that an administrator makes DRAM or a path smaller or larger."""
    deletes: float = 0.0
    """Odds, at each step, that somebody deletes a slab's file."""
    clients: float = 0.2
    """Odds, at each step, that an administrator clears, somebody flushes, an engine acts."""
    checks: float = 0.02
    """Odds that a step is followed by a check of all of memory; 1: each is."""
    no_eviction: bool = False
    """The disk has room for every block: then nothing that a flush acknowledged may ever go."""


_PLANS: dict[str, Plan] = {
    "power": Plan(shape=Shape()),
    "roomy": Plan(
        shape=Shape(slabs=6, slab_slots=32, dram_extents=4, dram_slots=24),
        no_eviction=True,
        clears=0.0,
        flushes=0.03,
    ),
    "process": Plan(shape=Shape(durability=Durability.PROCESS)),
    "failing": Plan(
        shape=Shape(read_error=0.01, write_error=0.02, short=0.02, sync_error=0.05, no_space=0.05, hang=0.01)
    ),
    "rotting": Plan(shape=Shape(flips=0.002), clears=0.0),
    "tiny": Plan(shape=Shape(slabs=2, slab_slots=6, dram_extents=2, dram_slots=8), clients=0.3),
    "daemon": Plan(
        shape=Shape(),
        deaths=((Death.DAEMON, 6.0), (Death.MOVER, 2.0), (Death.POWER, 1.0)),
        points_between=250,
    ),
    "disks": Plan(shape=Shape(paths=2, slabs=2, dram_extents=4), clears=0.004),
    "resized": Plan(shape=Shape(dram_extents=2), resizes=0.004, deletes=0.001, points_between=800),
    "deleted": Plan(shape=Shape(paths=2, slabs=2), deletes=0.002, clears=0.001),
    "unindexed": Plan(
        shape=Shape(durability=Durability.NONE, hbm_slots=0),
        asides=0.0,
        deaths=((Death.DAEMON, 4.0), (Death.MOVER, 2.0), (Death.EVERYTHING, 1.0), (Death.POWER, 1.0)),
        points_between=150,
    ),
    "watched": Plan(shape=Shape(dram_extents=2, dram_slots=10, slabs=5, slab_slots=24), checks=1.0),
    "comparing": Plan(
        shape=Shape(flips=0.01, comparing=0.97, devices=2), clears=0.0, clients=0.3, checks=0.1
    ),
}


def plan_of(seed: int) -> tuple[str, Plan]:
    """Name and plan of a seed."""
    name = list(_PLANS)[seed % len(_PLANS)]
    return name, _PLANS[name]
