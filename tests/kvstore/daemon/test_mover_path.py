"""The order in which one mover is told things, without a process behind it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.daemon import mover_path as module
from kvstore.daemon.mover_path import MoverPath
from kvstore.layout import Tier
from kvstore.mover.link import MoverLink
from kvstore.recorder import NoRecorder
from kvstore.wire.packed import MOVE

SLOT_BYTES = 4096
WAIT_S = 5.0


class FakeLink:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended = self.wants_write = self.starved = self.killed = False
        self.room = 8
        self.pid = 1
        self.pidfd = os.eventfd(0)
        self.ours, self.theirs = socket.socketpair()
        self.extent_error: OSError | None = None
        self.stalled = self.away_s = 0.0

    def fileno(self) -> int:
        return self.ours.fileno()

    def send_extent(self, extent: int, _nbytes: int, _fd: int) -> None:
        if self.extent_error is not None:
            raise self.extent_error
        self.said.append(f"extent {extent}")

    def send_slab(self, extent: int, *_rest: int) -> None:
        self.said.append(f"slab {extent}")

    def send_drop(self, _tier: Tier, extent: int) -> None:
        self.said.append(f"drop {extent}")

    def send_moves(self, moves: NDArray[np.void]) -> int:
        self.said.append(f"moves {moves['dram_extent'].tolist()}")
        return len(moves)

    def kill(self) -> None:
        self.killed = True

    def stalled_s(self) -> float:
        return self.stalled

    def not_watched(self, away_s: float) -> None:
        self.away_s += away_s

    def stop(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        os.close(self.pidfd)


class SlowKept:
    """A keeper that confirms when it is told to."""

    def __init__(self) -> None:
        self.asked, self.confirm = asyncio.Event(), asyncio.Event()

    async def add(self, _fds: Mapping[str, int]) -> None:
        self.asked.set()
        await self.confirm.wait()

    def remove(self, names: Iterable[str]) -> None:
        """Nothing is kept."""


class Rig:
    """One path whose store always has one move for its mover, into DRAM extent 10."""

    def __init__(self) -> None:
        self.link, self.kept = FakeLink(), SlowKept()
        self.told: list[str] = []
        self.paths = SimpleNamespace(
            hangs=lambda _: self.told.append("hangs"), answers=lambda _: self.told.append("answers")
        )
        self.waiting = True
        start: Any = lambda *_args, **_kwargs: self.link  # noqa: E731
        config = SimpleNamespace(nvme_threads=1, nvme_throttle=None, durability=Durability.POWER)
        owner: Any = SimpleNamespace(
            config=config,
            store=SimpleNamespace(take_moves=self._take, paths=self.paths, extents=lambda _tier: []),
            warnings={},
            settle_soon=lambda: None,
            counters=SimpleNamespace(add=lambda *_: None),
            recorder=NoRecorder(),
            ahead_ms=0,
        )
        info = SimpleNamespace(extent=10, nbytes=4096)
        memory: Any = SimpleNamespace(extents=lambda tier: [(info, 0)] if tier is Tier.DRAM else [])
        columns: Any = SimpleNamespace(
            extent_slot_bytes=[SLOT_BYTES], extent_bytes=[1 << 20], extent_slot_base=[0], extent_slots=[0],
            pools=[SimpleNamespace(state=np.zeros(0, dtype=np.uint64))] * 3,
        )  # fmt: skip
        slabs: Any = SimpleNamespace(number=lambda _: 1, slot_bytes=lambda _: SLOT_BYTES)
        opened: Any = SimpleNamespace(
            directory=SimpleNamespace(path=Path("/nowhere"), lock_fd=-1), plan=SimpleNamespace(map_bytes=0)
        )
        space: Any = SimpleNamespace(slabs_bytes=0, promise_soon=lambda: None)
        kept: Any = self.kept
        self.path = MoverPath(
            number=0,
            owner=owner,
            kept=kept,
            memory=memory,
            columns=columns,
            slabs=slabs,
            opened=opened,
            space=space,
            start_link=start,
        )
        index: Any = SimpleNamespace(start=lambda: None, due=lambda: None)
        self.path.index = index

    async def in_service(self) -> None:
        """Returns when the mover takes work."""
        for _ in range(1000):
            if self.path.in_service:
                return
            await asyncio.sleep(0.001)
        raise TimeoutError

    def _take(self, _path: int, _limit: int, _writes: int, _early: int) -> NDArray[np.void]:
        moves = np.zeros(1 if self.waiting else 0, dtype=MOVE)
        moves["id"], moves["dram_extent"] = 1, 10
        self.waiting = False
        return moves


def test_no_move_overtakes_the_extent_that_it_names() -> None:
    """A mover that was only starting was sent moves before its extents, and refused them: extent 10 is not mapped."""

    async def work() -> None:
        rig = Rig()
        running = asyncio.create_task(rig.path.run_forever())
        await asyncio.wait_for(rig.kept.asked.wait(), WAIT_S)
        rig.path.pump()  # as it comes after every call into the store
        rig.path.extent_added(11, 4096, 0)
        assert rig.link.said == [], "it is not in the keeper: it may touch no memory yet"
        assert not rig.path.in_service
        rig.kept.confirm.set()
        await rig.in_service()
        assert rig.link.said == ["extent 10", "slab 0", "moves [10]"]
        rig.path.extent_added(12, 4096, 0)
        assert rig.link.said[-1] == "extent 12"
        running.cancel()
        asyncio.get_running_loop().remove_reader(rig.link.fileno())
        rig.link.close()

    asyncio.run(work())


def test_a_mover_that_cannot_be_given_an_extent_is_replaced() -> None:
    """Out of descriptors, a mover went on without an extent, and blocks that it was to read there were given up."""

    async def work() -> None:
        rig = Rig()
        rig.kept.confirm.set()
        running = asyncio.create_task(rig.path.run_forever())
        await rig.in_service()
        rig.link.extent_error = OSError(errno.EMFILE, "too many open files")
        rig.path.extent_added(12, 4096, 0)
        assert rig.link.killed
        running.cancel()
        asyncio.get_running_loop().remove_reader(rig.link.fileno())
        rig.link.close()

    asyncio.run(work())


def test_a_disk_that_does_not_answer_is_told_once_and_loses_its_mover_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.005)

    async def work() -> None:
        rig = Rig()
        rig.kept.confirm.set()
        running = asyncio.create_task(rig.path.run_forever())
        await rig.in_service()
        for stalled_s, told in ((2.9, []), (3.1, ["hangs"]), (59.0, ["hangs"]), (0.0, ["hangs", "answers"])):
            rig.link.stalled = stalled_s
            await asyncio.sleep(0.1)
            assert rig.told == told
            assert rig.path.hangs is (told[-1:] == ["hangs"])
        assert not rig.link.killed
        rig.link.stalled = 61.0
        await asyncio.sleep(0.1)
        assert rig.link.killed
        assert rig.told == ["hangs", "answers", "hangs"]
        running.cancel()
        asyncio.get_running_loop().remove_reader(rig.link.fileno())
        rig.link.close()

    asyncio.run(work())


def test_a_machine_that_stood_still_is_no_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where daemon and mover stood still for more than 3 s, the daemon took the disk out of service when it went on:
    it looked at the clock before the mover could answer."""
    monkeypatch.setattr(module, "_WATCH_S", 0.005)
    monkeypatch.setattr(module, "_HANGS_S", 0.1)

    async def work() -> None:
        rig = Rig()
        rig.kept.confirm.set()
        running = asyncio.create_task(rig.path.run_forever())
        await rig.in_service()
        began_s = time.monotonic()
        monkeypatch.setattr(
            FakeLink, "stalled_s", lambda link: max(0.0, time.monotonic() - began_s - link.away_s)
        )
        time.sleep(0.3)  # noqa: ASYNC251 (the machine)
        await asyncio.sleep(0.03)
        assert rig.told == []
        assert rig.link.away_s > 0.25
        await asyncio.sleep(0.3)
        assert rig.told == ["hangs"], "the disk is found out all the same"
        running.cancel()
        asyncio.get_running_loop().remove_reader(rig.link.fileno())
        rig.link.close()

    asyncio.run(work())


def test_a_link_short_of_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that takes no descriptor is writable all the time: the loop spun over it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process: Any = SimpleNamespace(pid=1)
    link = MoverLink(process, ours, -1, max_outstanding=8)
    failures = [errno.ETOOMANYREFS]
    real = module.wire.send_packet

    def send(sock: socket.socket, packet: bytes, fd: int | None = None) -> None:
        if fd is not None and failures:
            raise OSError(failures.pop(), "too many references")
        real(sock, packet, fd)

    monkeypatch.setattr(module.wire, "send_packet", send)
    fd = os.memfd_create("test")
    link.send_extent(3, 4096, fd)
    assert link.starved
    assert link.room == 0, "no move may overtake it"
    link.flush()
    assert not link.starved
    assert link.room == 8
    packet, received = module.wire.receive_packet(theirs)
    assert isinstance(module.wire.parse(packet), module.wire.Extent)
    assert received is not None
    os.close(received)
    os.close(fd)
    link.stop()
    theirs.close()


def test_a_slab_goes_only_once_the_index_has_forgotten_it() -> None:
    """A slab was deleted for one of another slot size before the commit that forgets it: a strict recovery after a kill
    in between would not have started."""

    async def work() -> None:
        rig = Rig()
        sizes, numbers, forgotten = {0: 2 * SLOT_BYTES}, {0: 1}, set[int]()
        table: Any = rig.path._slabs._table
        table.number, table.slot_bytes, table.newest = numbers.__getitem__, sizes.__getitem__, 1
        table.set = lambda extent, number, size: (
            numbers.update({extent: number}),
            sizes.update({extent: size}),
        )
        directory: Any = rig.path._slabs._directory
        directory.new_slab_number = lambda: 2
        index: Any = SimpleNamespace(has_forgotten=lambda number: number in forgotten)
        rig.path._slabs._index = index
        running = asyncio.create_task(rig.path.run_forever())
        rig.kept.confirm.set()
        await rig.in_service()
        rig.path.pump()
        assert rig.link.said == ["extent 10"], "its moves wait"
        forgotten.add(1)
        rig.path.pump()
        assert rig.link.said == ["extent 10", "slab 0", "drop 0", "slab 0", "moves [10]"]
        assert numbers == {0: 2}
        running.cancel()
        asyncio.get_running_loop().remove_reader(rig.link.fileno())
        rig.link.close()

    asyncio.run(work())
