"""One life of the daemon in the simulated machine: its own code on an event loop without time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from eviction.lru import Lru
from eviction.reuse_ages import ReuseAges
from kvstore.daemon.admin import Admin
from kvstore.daemon.movers import Movers, PathStart
from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.owner import Owner
from kvstore.daemon.recovery import Tables
from kvstore.daemon.resizer import Resizer
from kvstore.daemon.resizing import DramResizable
from kvstore.layout import Tier, open_columns, table_bytes
from kvstore.mover.link import MoverLink
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.tiering.next_turns import CLASSES, NextTurns
from kvstore.wire import mover as wire
from tests.simulation.loop import SimLoop
from tests.simulation.memory import SimMemory
from tests.simulation.mover import Link, SimMover
from tests.simulation.shape import SLOT_BYTES

if TYPE_CHECKING:
    from tests.simulation.machine import Machine

__all__ = ["Life"]


class _Kept:
    """What the keeper holds: names are enough here."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def add(self, fds: dict[str, int]) -> None:
        await asyncio.sleep(0)
        self._machine.kept.update(fds)

    def remove(self, names: list[str]) -> None:
        for name in names:
            self._machine.kept.pop(name, None)


class _Owner(Owner):
    """With the machine's clock; `settling` is told whenever a call into the store has been made."""

    clock: Callable[[], int]
    _clock_ms = 0
    settling: Callable[[], None] = staticmethod(lambda: None)

    def settle_soon(self) -> None:
        self.settling()
        super().settle_soon()

    def now_ms(self) -> int:
        self._clock_ms = max(self._clock_ms, self.clock())
        return self._clock_ms


class Life:
    """One life of the daemon."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loop = SimLoop(lambda: machine.now_s, machine.readable)
        self.links: list[Link] = []
        fresh = machine.tables is None
        limits = StoreLimits(
            max_writes=64,
            ghosts=32,
            victim_batch=4,
            reserve_slots=1,
            max_waiting_leases=64,
            paths=machine.shape.paths,
        )
        if fresh:
            machine.tables = memoryview(bytearray(table_bytes(machine.table_shape)))
            store = Store.create(
                machine.tables, machine.table_shape, limits, Lru(), fault=machine.store_point
            )
        else:
            assert machine.tables is not None
            store = Store.recover(
                machine.tables, limits, Lru(), now_ms=machine.now_ms(), fault=machine.store_point
            )
        self.store = store
        store.prefetching.turns = NextTurns(machine.table_shape.max_rows, ReuseAges(CLASSES, 256))
        columns = open_columns(machine.tables, machine.table_shape)
        self.columns = columns
        tables = Tables(fd=-1, columns=columns, store=store, fresh=fresh)
        self.owner = _Owner(store=store, config=machine.config, boot_epoch=1)
        self.owner.clock = machine.now_ms
        self.memory = SimMemory(machine, self.owner)
        if fresh:
            machine.dram_extents = machine.shape.dram_extents
            for _ in range(machine.shape.dram_extents):
                self.memory.add()
            for device in range(machine.shape.devices if machine.shape.hbm_slots else 0):
                nbytes = machine.shape.hbm_slots * SLOT_BYTES
                extent = store.add_extent(tier=Tier.HBM, device=device, nbytes=nbytes, slot_bytes=SLOT_BYTES)
                machine.hbm[int(extent)] = bytearray(nbytes)
        else:
            self.memory.restore()
        self.movers = Movers(
            owner=self.owner,
            kept=_Kept(machine),  # type: ignore[arg-type]
            memory=self.memory,  # type: ignore[arg-type]
            tables=tables,
            secret=b"",
            inherited=dict(machine.kept),
            open_path=machine.open_path,
            start_link=self._start_link,
        )
        machine.kept[SlabTable.NAME] = self.movers.slabs.fd
        self.admin = Admin(
            owner=self.owner,
            sessions=None,  # type: ignore[arg-type]
            memory=None,  # type: ignore[arg-type]
            movers=self.movers,
            resizing=None,  # type: ignore[arg-type]
            tenancy=None,  # type: ignore[arg-type]
        )
        self.dram = Resizer(self.owner, DramResizable(self.memory))  # type: ignore[arg-type]
        self.starts = [PathStart() for _ in machine.config.nvme]
        self.work = [
            *(
                self.loop.create_task(self.movers.run_path(number, machine.config.nvme[number], start))
                for number, start in enumerate(self.starts)
            ),
            self.loop.create_task(self.owner.tick_forever()),
            self.loop.create_task(self._sweep()),
            self.loop.create_task(self.memory.grow_forever()),
            self.loop.create_task(self.dram.run_forever()),
        ]
        self.dram.changed()  # a life before may have ended before the size held
        self.movers.serving = True

    def _start_link(self, config: wire.Config, *, lock_fd: int | None = None) -> MoverLink:
        mover = SimMover(self.machine, config.directory, config.slabs_bytes)
        self.machine.movers.append(mover)
        link = Link(mover)
        self.links.append(link)
        self.machine.pidfds[link.pidfd] = mover
        return link

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.movers.commit_soon()

    async def resize_dram(self, extents: int) -> bool:
        """As Resizing.resize_dram: whether the tier has its size within some time."""
        self.machine.dram_extents = extents
        self.dram.changed()
        return await self.dram.settled(3.0)

    async def resize_path(self, number: int, slabs: int) -> bool:
        """As Resizing.resize_path, of a path that is in service."""
        found = self.movers.path(number)
        if found is None:
            return False
        mover, resizer = found
        shape = self.machine.shape
        await mover.space.take(shape.capacity_of(slabs), shape.index_share_bytes)
        mover.size_changed()
        await mover.index.catch_up()
        resizer.changed()
        return await resizer.settled(3.0)

    def die(self) -> None:
        """The process is gone: its sockets are at end of file."""
        self.loop.die()
        for link in self.links:
            if not link.mover.eof:
                link.mover.end_of_file()
