"""The store against a naive model: two models of different slot size in one budget, and a crash at any write."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.moves import MoveStatus
from tests.simulation.world import Client, World

_NUMBER = st.integers(0, 7)
_COUNT = st.integers(1, 10)


class StoreMachine(RuleBasedStateMachine):
    """Rules are the world's operations; the invariant is its check."""

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed: int) -> None:
        self.world = World(seed)
        self.world.attach(0, 0)
        self.world.attach(1, 0)

    def _client(self, number: int) -> Client | None:
        return self.world.client(number)

    @rule(model=st.integers(0, 1), device=st.sampled_from([0, 0, 0, 1, None]))
    def attach(self, model: int, device: int | None) -> None:
        self.world.attach(model, device if model == 0 or device != 1 else 0)

    @rule(
        who=_NUMBER,
        chain=_NUMBER,
        length=st.integers(0, 10),
        first=st.integers(0, 3),
        reserve=st.integers(0, 2),
    )
    def acquire(self, who: int, chain: int, length: int, first: int, reserve: int) -> None:
        if client := self._client(who):
            self.world.acquire(client, chain, length, first=first, reserve=reserve)

    @rule(who=_NUMBER, chain=_NUMBER, length=_COUNT)
    def acquire_private(self, who: int, chain: int, length: int) -> None:
        if client := self._client(who):
            self.world.acquire(client, chain, length, private=True)

    @rule(who=_NUMBER, chain=_NUMBER, length=_COUNT)
    def acquire_and_release_before_reading(self, who: int, chain: int, length: int) -> None:
        if client := self._client(who):
            self.world.acquire(client, chain, length, stale_release=True)

    @rule(who=_NUMBER, count=_COUNT, twice=st.booleans())
    def seal(self, who: int, count: int, twice: bool) -> None:
        if client := self._client(who):
            self.world.seal(client, count, twice=twice)

    @rule(who=_NUMBER, slots=st.integers(0, 3), room=st.integers(0, 8))
    def credit(self, who: int, slots: int, room: int) -> None:
        if client := self._client(who):
            self.world.want(client, slots, room)
        if client := self._client(who):
            self.world.top_up(client)

    @rule(who=_NUMBER, count=_COUNT, release=st.booleans())
    def store_down(self, who: int, count: int, release: bool) -> None:
        if client := self._client(who):
            self.world.store_down(client, count, release=release)

    @rule(who=_NUMBER)
    def write_through(self, who: int) -> None:
        if client := self._client(who):
            _write_through(self.world, client)

    @rule(who=_NUMBER, count=_COUNT)
    def load(self, who: int, count: int) -> None:
        if client := self._client(who):
            self.world.load(client, count)

    @rule(who=_NUMBER, count=st.integers(1, 30))
    def release(self, who: int, count: int) -> None:
        if client := self._client(who):
            self.world.release(client, count)

    @rule(who=_NUMBER, chain=_NUMBER)
    def prefetch_or_pin(self, who: int, chain: int) -> None:
        if client := self._client(who):
            self.world.prefetch(client, chain, 10)
        if chain == 7 and (client := self._client(who)):
            self.world.pin(client, chain)

    @rule(who=_NUMBER, chain=_NUMBER)
    def report_wrong(self, who: int, chain: int) -> None:
        if chain >= 6 and (client := self._client(who)):
            self.world.report(client, chain, 2)

    @rule(who=_NUMBER)
    def cancel(self, who: int) -> None:
        if client := self._client(who):
            self.world.cancel(client)

    @rule(who=_NUMBER)
    def lose(self, who: int) -> None:
        if client := self._client(who):
            self.world.lose(client)

    @rule(who=_NUMBER)
    def resume(self, who: int) -> None:
        if client := self.world.client(who, attached=False):
            self.world.late_write(client)
            self.world.resume(client)

    @rule(who=_NUMBER, attached=st.booleans())
    def kill(self, who: int, attached: bool) -> None:
        if client := self.world.client(who, attached=attached):
            self.world.kill(client)

    @rule(limit=st.integers(1, 20), count=st.integers(0, 20))
    def move(self, limit: int, count: int) -> None:
        self.world.take_moves(limit)
        self.world.finish_moves(count)

    @rule(status=st.sampled_from([MoveStatus.CORRUPT, MoveStatus.IO_ERROR, MoveStatus.CANCELLED]))
    def move_fails(self, status: MoveStatus) -> None:
        self.world.finish_moves(2, status)

    @rule()
    def mover_dies(self) -> None:
        self.world.mover_ended()

    @rule()
    def zombie(self) -> None:
        self.world.zombie_move()

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(really=st.integers(0, 7))
    def clear(self, really: int) -> None:
        if really == 0:
            self.world.clear()

    @rule(points=st.integers(0, 12))
    def daemon_will_die(self, points: int) -> None:
        self.world.fault_in = points

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def _write_through(world: World, client: Client) -> None:
    """Room, copies, and the room given back, as an engine does after its seals."""
    for act in (
        lambda: world.seal(client, 10),
        lambda: world.want(client, 0, 10),
        lambda: world.top_up(client),
        lambda: world.store_down(client, 10, release=True),
    ):
        if client.attached:
            act()


def random_step(world: World, rng: random.Random) -> None:
    """One random operation of the world."""
    client = world.client(rng.randrange(8))
    if client is None:
        lost = world.client(rng.randrange(8), attached=False)
        if lost is not None:
            world.resume(lost)
        else:
            world.attach(rng.randrange(2), 0)
        return
    count = rng.randrange(1, 12)
    choices = [
        (20, lambda: world.acquire(client, rng.randrange(4), rng.randrange(11), reserve=rng.randrange(2))),
        (3, lambda: world.acquire(client, rng.randrange(4), rng.randrange(11), private=True)),
        (4, lambda: world.acquire(client, rng.randrange(4), rng.randrange(11), stale_release=True)),
        (20, lambda: world.seal(client, count, twice=rng.random() < 0.2)),
        (10, lambda: world.want(client, rng.randrange(3), rng.randrange(8))),
        (10, lambda: world.top_up(client)),
        (8, lambda: world.store_down(client, count, release=rng.random() < 0.8)),
        (20, lambda: _write_through(world, client)),
        (12, lambda: world.load(client, count)),
        (10, lambda: world.release(client, rng.randrange(1, 30))),
        (5, lambda: world.release(client, 100)),
        (3, lambda: world.prefetch(client, rng.randrange(4), 10)),
        (2, lambda: world.cancel(client)),
        (2, lambda: world.lose(client)),
        (1, lambda: world.kill(client)),
        (2, lambda: world.attach(rng.randrange(2), rng.choice([0, 0, None]))),
        (14, lambda: world.take_moves(rng.randrange(1, 20))),
        (14, lambda: world.finish_moves(rng.randrange(1, 20))),
        (1, lambda: world.finish_moves(1, rng.choice([MoveStatus.CORRUPT, MoveStatus.IO_ERROR]))),
        (1, world.mover_ended),
        (3, world.zombie_move),
        (8, world.tick),
        (4, lambda: setattr(world, "fault_in", rng.randrange(16))),
        (1, lambda: world.pin(client, rng.randrange(4))),
        (1, lambda: world.report(client, rng.randrange(4), rng.randrange(1, 5))),
    ]
    weights, acts = zip(*choices, strict=True)
    rng.choices(acts, weights)[0]()


@pytest.mark.parametrize("seed", range(6))
def test_long_random_run(seed: int) -> None:
    """Hundreds of operations with crashes between writes: nothing wrong is ever served, leaked, or taken away."""
    rng = random.Random(seed)
    world = World(seed)
    world.attach(0, 0)
    world.attach(1, 0)
    for _ in range(400):
        random_step(world, rng)
        world.check()
    assert world.crashes > 2
    assert world.store.stats().rows > 0 or world.store.stats().counters
