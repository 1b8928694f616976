"""How long a flush and a drain wait, over paths that are only said to be there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.config import NvmePath, ServeConfig
from kvstore.daemon import movers as module
from kvstore.daemon import write_down
from kvstore.daemon.movers import Movers
from kvstore.daemon.outstanding import Outstanding
from kvstore.daemon.write_down import Flushed
from kvstore.layout import Tier
from kvstore.moves import FlushLeft, MoveKind
from kvstore.units import GIB
from kvstore.wire.packed import MOVE

PATIENCE_S = 0.2
LONG_S = 3.0


class FakePath:
    """One path; `make_durable` never returns where it hangs. `fails`: blocks that it fails between looks."""

    def __init__(self, *, in_service: bool, answers: bool, fails: int = 0, idle: bool = False) -> None:
        self.in_service, self.answers, self.idle = in_service, answers, idle
        self.hangs = self.writes_paused = False
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

    async def timed(self, work: Any) -> tuple[float, Flushed]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await work
        return loop.time() - began_s, answer


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_down, "_DRAIN_PATIENCE_S", PATIENCE_S)


@pytest.mark.parametrize(
    "path",
    [None, FakePath(in_service=False, answers=False), FakePath(in_service=True, answers=False)],
    ids=["not-open", "no-mover", "hangs"],
)
def test_a_drain_gives_a_disk_up_that_is_away(path: FakePath | None) -> None:
    """A drain waited for its whole deadline for blocks that nothing could write."""

    async def work() -> None:
        rig = Rig(path, [3])
        took_s, flushed = await rig.timed(rig.movers.drain(30.0))
        assert took_s < LONG_S
        assert (flushed.durable_blocks, flushed.pending_blocks) == (5, 3)

    asyncio.run(work())


def test_a_drain_waits_as_long_as_blocks_are_written() -> None:
    async def work() -> None:
        rig = Rig(
            FakePath(in_service=False, answers=False), [9, 9, 8, 8, 8, 7, 7, 7, 6, 6, 6, 5, 4, 3, 2, 1, 0]
        )
        _, flushed = await rig.timed(rig.movers.drain(30.0))
        assert flushed.pending_blocks == 1, "a path that is away may have had something"

    asyncio.run(work())


def test_a_drain_waits_for_disks_that_are_well() -> None:
    async def work() -> None:
        rig = Rig(FakePath(in_service=True, answers=True), [3] * 12 + [0])
        took_s, flushed = await rig.timed(rig.movers.drain(30.0))
        assert took_s > 2 * PATIENCE_S, "slow is not away"
        assert flushed.pending_blocks == 0

    asyncio.run(work())


def test_a_drain_gives_a_disk_up_that_fails_every_write() -> None:
    """With a full disk, or its folder gone, SIGTERM took the whole drain deadline: 30 s of writes that all failed."""

    async def work() -> None:
        rig = Rig(FakePath(in_service=True, answers=True, fails=1), [3])
        took_s, flushed = await rig.timed(rig.movers.drain(30.0))
        assert took_s < LONG_S
        assert flushed.pending_blocks == 3

    asyncio.run(work())


def test_a_drain_goes_on_while_some_writes_succeed() -> None:
    async def work() -> None:
        rig = Rig(
            FakePath(in_service=True, answers=True, fails=1), [9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 2, 1, 0]
        )
        _, flushed = await rig.timed(rig.movers.drain(30.0))
        assert flushed.pending_blocks == 0

    asyncio.run(work())


def test_a_flush_waits_for_a_path_that_may_come_back() -> None:
    async def work() -> None:
        rig = Rig(None, [3])
        took_s, flushed = await rig.timed(rig.movers.flush(1.0))
        assert took_s > 0.9
        assert flushed.pending_blocks == 3

    asyncio.run(work())


@pytest.mark.parametrize("what", ["hangs", "writes_paused"])
@pytest.mark.parametrize("blocks", [3, 0])
def test_a_flush_gives_a_disk_up_that_is_known_to_hang_or_to_take_nothing(
    monkeypatch: pytest.MonkeyPatch, what: str, blocks: int
) -> None:
    """A flush waited for a minute for a disk that had been known for most of it to hang, or to fail every write."""
    monkeypatch.setattr(write_down, "_HUNG_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(write_down, "_PAUSED_PATIENCE_S", PATIENCE_S)

    async def work() -> None:
        path = FakePath(in_service=True, answers=True)
        rig = Rig(path, [blocks])
        path.answers = False
        setattr(path, what, True)
        took_s, flushed = await rig.timed(rig.movers.flush(30.0))
        assert took_s < LONG_S
        assert flushed.pending_blocks == max(1, blocks)

    asyncio.run(work())


def test_a_flush_ends_when_there_is_no_place_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every slot of the disk pinned a flush waited to its deadline for what could never be written."""
    monkeypatch.setattr(write_down, "_NOTHING_FITS_S", PATIENCE_S)

    async def work() -> None:
        rig = Rig(FakePath(in_service=True, answers=True, idle=True), [9, 8, 3])
        took_s, flushed = await rig.timed(rig.movers.flush(30.0))
        assert took_s < LONG_S
        assert (flushed.pending_blocks, flushed.unfit_blocks) == (3, 3)

    asyncio.run(work())


class StripedPath:
    """A path whose disk does so many bytes a second, in virtual time."""

    def __init__(self, rate: float) -> None:
        self.outstanding = Outstanding()
        self.rate, self.written = rate, 0
        self._under_way: list[np.ndarray] = []  # type: ignore[type-arg]
        self._next = 1

    def pump(self, writes: int = 0) -> int:
        moves = np.zeros(writes, dtype=MOVE)
        moves["id"] = np.arange(self._next, self._next + writes)
        moves["kind"], moves["length"] = MoveKind.WRITE, 1 << 20
        self._next += writes
        self.outstanding.sent(moves, module.time.monotonic())
        self._under_way += [moves[at : at + 1] for at in range(writes)]
        return writes

    def run(self, seconds: float) -> None:
        """What the disk gets done in this time is answered."""
        for _ in range(min(len(self._under_way), round(self.rate * seconds / (1 << 20)))):
            self.outstanding.ended(self._under_way.pop(0)["id"], module.time.monotonic())
            self.written += 1


def test_writes_go_to_disks_by_what_they_get_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first path was given all it had room for, and the next only what was left over."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    fast, slow, hung = StripedPath(600 << 20), StripedPath(200 << 20), StripedPath(0)
    rig = Rig(None, [0])
    paths: Any = {0: hung, 1: slow, 2: fast}
    rig.movers._paths = paths
    for _ in range(400):
        rig.movers.pump()
        now.s += 0.01
        for path in (fast, slow, hung):
            path.run(0.01)
    assert fast.written == pytest.approx(2400, rel=0.1)
    assert slow.written == pytest.approx(800, rel=0.1)
    assert fast.outstanding.load.outstanding_bytes < 400 << 20, "half a second of it, and no more"
    assert slow.outstanding.load.outstanding_bytes < 150 << 20
    assert hung.outstanding.load.outstanding_bytes < 600 << 20


def test_few_writes_are_spread_over_disks_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At low load one disk was written to and read from, and the other had nothing."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    one, two = StripedPath(1 << 30), StripedPath(1 << 30)
    rig = Rig(None, [0])
    paths: Any = {0: one, 1: two}
    rig.movers._paths = paths
    waiting = 0

    def few(path: StripedPath, writes: int) -> int:
        nonlocal waiting
        taken = min(writes, waiting)
        waiting -= taken
        return StripedPath.pump(path, taken)

    for path in (one, two):
        monkeypatch.setattr(path, "pump", lambda writes=0, path=path: few(path, writes))
    for _ in range(100):
        waiting += 16
        rig.movers.pump()
        now.s += 0.02
        for path in (one, two):
            path.run(0.02)
    assert one.written + two.written == pytest.approx(1600, rel=0.1)
    assert one.written == pytest.approx(two.written, rel=0.3)
