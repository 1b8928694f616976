"""How long a flush and a drain wait, over paths that are only said to be there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import NvmePath, ServeConfig
from kvstore.daemon import movers as module
from kvstore.daemon.movers import Movers
from kvstore.layout import Tier
from kvstore.moves import FlushLeft
from kvstore.units import GIB

PATIENCE_S = 0.2
LONG_S = 3.0


class FakePath:
    """One path; `make_durable` never returns where it hangs. `fails`: blocks that it fails between looks."""

    def __init__(self, *, in_service: bool, answers: bool, fails: int = 0) -> None:
        self.in_service, self.answers = in_service, answers
        self._fails, self._failed = fails, 0

    @property
    def counts(self) -> SimpleNamespace:
        self._failed += self._fails
        return SimpleNamespace(**{**dict.fromkeys(module._COUNTED, 0), "failed_blocks": self._failed})

    async def make_durable(self) -> None:
        if not self.answers:
            await asyncio.Event().wait()


class Rig:
    """Movers of one path over a store that has `left` blocks to write."""

    def __init__(self, path: FakePath | None, left: list[int]) -> None:
        """`left`: what is still to come at each look; the last for ever."""
        self.left = left
        config = ServeConfig(socket="/tmp/k", nvme=(NvmePath(path="/nowhere", capacity_bytes=GIB),))
        store = SimpleNamespace(
            flush=lambda: [0] * left[0],
            left_of=self._left_of,
            stats=lambda: SimpleNamespace(tiers=[SimpleNamespace(tier=Tier.NVME, sealed_slots=5)]),
        )
        owner: Any = SimpleNamespace(
            config=config, store=store, settle_soon=lambda: None, on_settle=lambda _: None
        )
        memory: Any = SimpleNamespace(listen=lambda *_: None)
        tables: Any = SimpleNamespace(
            columns=SimpleNamespace(shape=SimpleNamespace(max_extents=4)), fresh=True
        )
        kept: Any = None
        self.movers = Movers(owner=owner, kept=kept, memory=memory, tables=tables, secret=b"", inherited={})
        paths: Any = {} if path is None else {0: path}
        self.movers._paths = paths

    def _left_of(self, _mark: object) -> FlushLeft:
        now = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return FlushLeft(coming=now, missing=now)

    async def timed(self, work: Any) -> tuple[float, tuple[int, int]]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await work
        return loop.time() - began_s, answer


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAIN_PATIENCE_S", PATIENCE_S)


@pytest.mark.parametrize(
    "path",
    [None, FakePath(in_service=False, answers=False), FakePath(in_service=True, answers=False)],
    ids=["not-open", "no-mover", "hangs"],
)
def test_a_drain_gives_a_disk_up_that_is_away(path: FakePath | None) -> None:
    """A drain waited for its whole deadline for blocks that nothing could write."""

    async def work() -> None:
        rig = Rig(path, [3])
        took_s, (durable, left) = await rig.timed(rig.movers.drain(30.0))
        assert took_s < LONG_S
        assert (durable, left) == (5, 3)

    asyncio.run(work())


def test_a_drain_waits_as_long_as_blocks_are_written() -> None:
    async def work() -> None:
        rig = Rig(
            FakePath(in_service=False, answers=False), [9, 9, 8, 8, 8, 7, 7, 7, 6, 6, 6, 5, 4, 3, 2, 1, 0]
        )
        _, (_, left) = await rig.timed(rig.movers.drain(30.0))
        assert left == 1, "a path that is away may have had something"

    asyncio.run(work())


def test_a_drain_waits_for_disks_that_are_well() -> None:
    async def work() -> None:
        rig = Rig(FakePath(in_service=True, answers=True), [3] * 12 + [0])
        took_s, (_, left) = await rig.timed(rig.movers.drain(30.0))
        assert took_s > 2 * PATIENCE_S, "slow is not away"
        assert left == 0

    asyncio.run(work())


def test_a_drain_gives_a_disk_up_that_fails_every_write() -> None:
    """With a full disk, or its folder gone, SIGTERM took the whole drain deadline: 30 s of writes that all failed."""

    async def work() -> None:
        rig = Rig(FakePath(in_service=True, answers=True, fails=1), [3])
        took_s, (_, left) = await rig.timed(rig.movers.drain(30.0))
        assert took_s < LONG_S
        assert left == 3

    asyncio.run(work())


def test_a_drain_goes_on_while_some_writes_succeed() -> None:
    async def work() -> None:
        rig = Rig(
            FakePath(in_service=True, answers=True, fails=1), [9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 2, 1, 0]
        )
        _, (_, left) = await rig.timed(rig.movers.drain(30.0))
        assert left == 0

    asyncio.run(work())


def test_a_flush_waits_for_a_path_that_may_come_back() -> None:
    async def work() -> None:
        rig = Rig(None, [3])
        took_s, (_, left) = await rig.timed(rig.movers.flush(1.0))
        assert took_s > 0.9
        assert left == 3

    asyncio.run(work())
