"""One machine in one thread: disk, memory, movers that are no processes, and lives of the daemon's own code.

A life is the real `Movers` (with `MoverPath`, `IndexWriter`, `Owner`, `Admin`) and the real `Store` on a `SimLoop`.
A mover is the real `Mover` over a `SimDisk`, with its socket two queues and its threads moments that the scheduler
chooses. `step` lets one thing happen, chosen by the seed: a callback, a thread's end, a message, a piece of I/O, a
client's call, or that time passes. Whatever could die between two of them, may (`Crash`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from eviction.lru import Lru
from kvstore.config import Durability, NvmePath, ServeConfig
from kvstore.daemon.admin import Admin
from kvstore.daemon.movers import Movers, PathStart
from kvstore.daemon.nvme import FoundPath, SlabTable
from kvstore.daemon.owner import Owner
from kvstore.daemon.recovery import Tables
from kvstore.errors import AlreadyExists, Corruption, NotFound
from kvstore.layout import TableShape, Tier, open_columns, table_bytes
from kvstore.mover.link import MoverLink
from kvstore.mover.process import Mover
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.wire import mover as wire
from tests.simulation.disk import SimDisk
from tests.simulation.index_twin import IndexFile, IndexTwin
from tests.simulation.loop import SimLoop
from tiers.nvme.capacity import SMALL_FILES_BYTES, SlabPlan, index_bytes, slab_file_bytes
from tiers.nvme.cleared import read_cleared, without_cleared
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.index import SLOT_REF
from tiers.nvme.recover import FoundRecords
from tiers.nvme.scan import keep_known, scan_slabs
from tiers.nvme.slab import list_slabs, stride_bytes

SLOT_BYTES = 4096
_FOLDER = "/sim/nvme"
START_MS = 1_700_000_000_000
_THREADS = 2


class Death(Enum):
    """Who dies."""

    MOVER = "mover"
    DAEMON = "daemon"
    EVERYTHING = "everything"
    POWER = "power"


class Crash(BaseException):
    """Somebody died here. Not an Exception: what dies handles nothing."""


class Wrong(AssertionError):
    """The store did what it must never do."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and odds of a machine."""

    durability: Durability = Durability.POWER
    dram_extents: int = 3
    dram_slots: int = 16
    """Of each extent."""
    paths: int = 1
    """Disks' folders, each with a mover, slabs and an index of its own."""
    hbm_slots: int = 24
    """Of one device, whose memory outlives the daemon, not the machine; 0: no engine has HBM of its own."""
    slabs: int = 3
    """Of each path."""
    slab_slots: int = 16
    read_error: float = 0.0
    write_error: float = 0.0
    short: float = 0.0
    sync_error: float = 0.0
    no_space: float = 0.0
    hang: float = 0.0
    """Odds, at each piece of I/O, that the disk answers nothing for up to 20 s."""
    flips: float = 0.0
    """Odds, at each step, that a bit on the medium flips."""

    @property
    def folders(self) -> list[str]:
        """Of the paths."""
        return [f"{_FOLDER}{number}" for number in range(self.paths)]

    @property
    def slab_bytes(self) -> int:
        return self.slab_slots * stride_bytes(SLOT_BYTES)

    @property
    def map_bytes(self) -> int:
        return 1 << 20

    @property
    def slab_room(self) -> int:
        """What slabs may take."""
        return self.slabs * slab_file_bytes(self.slab_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Everything in one folder."""
        return self.slab_room + index_bytes(self.map_bytes) + SMALL_FILES_BYTES


class _Clock:
    """In the place of the module `time` wherever the daemon and the mover read it: the machine's time, and some of it
    passes with each reading."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def monotonic(self) -> float:
        self._machine.now_s += 5e-5
        return self._machine.now_s

    def time_ns(self) -> int:
        return self._machine.now_ms() * 1_000_000


_CLOCKED = tuple(
    sys.modules[name]
    for name in (
        "kvstore.daemon.load_path",
        "kvstore.daemon.mover_path",
        "kvstore.daemon.movers",
        "kvstore.daemon.owner",
        "kvstore.mover.process",
        "kvstore.mover.link",
        "tiers.nvme.io",
    )
)


class _Shared:
    """The DRAM extents that a mover has been given."""

    def __init__(self, dram: dict[int, bytearray]) -> None:
        self._dram = dram
        self._mapped: dict[int, memoryview] = {}

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        self._mapped[extent] = memoryview(self._dram[extent])

    def view(self, extent: int) -> memoryview:
        if extent not in self._mapped:
            raise NotFound(f"extent {extent} is not mapped")
        return self._mapped[extent]

    def drop(self, extent: int) -> None:
        del self._mapped[extent]

    def close(self) -> None:
        self._mapped.clear()


_A_FAULT = re.compile(r": \w+(Error|Exception): ")
"""In a notice: an exception that nobody expected, caught where a thread begins."""


class SimMover(Mover):
    """The process of a path: the real one, with its socket two queues and its threads moments in `choices`."""

    def __init__(self, machine: Machine, folder: str) -> None:
        self.machine = machine
        self.folder = folder
        self.inbox: deque[wire.Message] = deque()
        self.outbox: deque[wire.Message] = deque()
        self.running: list[tuple[float, Callable[[], None]]] = []
        """What its threads are at, and when the disk lets it end."""
        self.opening: wire.Slab | wire.Drop | None = None
        self.eof = False
        self.exited = False
        super().__init__(
            None,  # type: ignore[arg-type]
            wire.Config(directory=folder, threads=_THREADS, slabs_bytes=machine.shape.slab_room),
            disk=machine.disk,
        )
        os.close(self._wake)
        self._dram = self._nvme._memory = _Shared(machine.dram)  # type: ignore[assignment]
        self._nvme._clock_ms = machine.now_ms

    def _send(self, message: wire.Message) -> None:
        if isinstance(message, wire.Notice) and _A_FAULT.search(message.text):
            self.machine.faults.append(message.text)
        self.outbox.append(message)

    def choices(self) -> list[Callable[[], None]]:
        """What may happen in it next."""
        if self.exited:
            return []
        found: list[Callable[[], None]] = []
        queue, slabs = self._queue, self._slabs
        if self.eof:
            if not self.running and self.opening is None:
                return [self.exit]
        else:
            if self.inbox:
                found.append(self._receive_one)
            if (queue._syncs or queue._may_read() or queue._may_write()) and len(self.running) <= _THREADS:
                found.append(self._start_one)
            if self.opening is None and slabs._asked:
                found.append(self._open_one)
            if self._held and not self.running:
                found.append(self._send_held)
        if self.machine.now_s >= self.machine.hung_until_s:
            found += [
                functools.partial(self._finish, number)
                for number, (ends_s, _) in enumerate(self.running)
                if ends_s <= self.machine.now_s
            ]
            if self.opening is not None:
                found.append(self._opened)
        return found

    def end_of_file(self) -> None:
        """The daemon's end of the socket is closed: what waits is forgotten, what runs is finished."""
        self.eof = True
        self.inbox.clear()
        self._queue.close()

    def exit(self) -> None:
        """It ends by itself."""
        self._storage.close()
        self.exited = True

    def kill(self) -> None:
        """SIGKILL: some of what it was writing is written in part."""
        self.eof = self.exited = True
        disk = self.machine.disk
        quiet, disk.before = disk.before, lambda operation: None
        for _, job in self.running:
            if self.machine.rng.random() < 0.5:
                disk.torn_write = self.machine.rng.randrange(8)
                job()
        disk.before, disk.torn_write = quiet, None
        self.running.clear()
        self.outbox.clear()

    def _receive_one(self) -> None:
        self._take(self.inbox.popleft(), 0)

    def _start_one(self) -> None:
        """A thread takes a job."""
        job = self._queue.get_now()
        if job is not None:
            self.running.append((self.machine.now_s + self.machine.latency_s(), job))
            if self.machine.rng.random() < self.machine.shape.hang:
                self.machine.hung_until_s = self.machine.now_s + self.machine.rng.uniform(0, 20)

    def _finish(self, number: int) -> None:
        self.running.pop(number)[1]()

    def _open_one(self) -> None:
        """The thread of the slabs takes what it was asked for."""
        self.opening = self._slabs._asked.popleft()

    def _opened(self) -> None:
        message, self.opening = self.opening, None
        assert message is not None
        self._open_or_drop(message)
        self._queue_pieces(self._slabs._done(message.extent))


class Link(MoverLink):
    """The daemon's end: the real one but for the socket and the process."""

    def __init__(self, mover: SimMover) -> None:
        self.mover = mover
        self.pidfd = os.dup(mover.machine.null_fd)
        self.outstanding = self.syncs = 0
        self.ended = False
        self._queued = deque()
        self._max_outstanding = 64
        self._starved = False
        self._progressed_s = mover.machine.now_s
        self._number = mover.machine.next_number()

    @property
    def pid(self) -> int:
        return self._number

    def fileno(self) -> int:
        return self._number

    @property
    def readable(self) -> bool:
        """Whether `receive` has something."""
        return not self.ended and bool(self.mover.outbox or self.mover.exited)

    def send_moves(self, moves: np.ndarray) -> int:
        count = min(len(moves), self.room)
        if count and self.mover.machine.rng.random() < 0.2:
            count = self.mover.machine.rng.randrange(count + 1)  # the socket took no more
        if count:
            self._began()
            self.outstanding += count
            self.mover.inbox.append(wire.Moves(moves[:count].copy()))
        return count

    def flush(self) -> None:
        pass

    def receive(self) -> list[wire.Message]:
        messages: list[wire.Message] = []
        replies: list[np.ndarray] = []
        for _ in range(self.mover.machine.rng.randrange(1, 8)):
            if not self.mover.outbox:
                self.ended = self.ended or self.mover.exited
                break
            message = self.mover.outbox.popleft()
            if isinstance(message, wire.Replies):
                self.outstanding -= len(message.replies)
                replies.append(message.replies)
            else:
                messages.append(message)
            if isinstance(message, wire.Synced):
                self.syncs -= 1
            self._progressed_s = self.mover.machine.now_s
        if replies:
            messages.insert(0, wire.Replies(np.concatenate(replies)))
        return messages

    def stalled_s(self) -> float:
        return self.mover.machine.now_s - self._progressed_s if self.outstanding or self.syncs else 0.0

    def kill(self) -> None:
        self.mover.kill()

    def stop(self) -> None:
        self.ended = True
        if not self.mover.eof:
            self.mover.end_of_file()

    def reap(self, timeout_s: float = 0.0) -> int | None:
        if not self.mover.exited:
            return None
        self.stop()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return 0

    def _began(self) -> None:
        if not (self.outstanding or self.syncs):
            self._progressed_s = self.mover.machine.now_s

    def _send(self, message: wire.Message, fd: int | None = None) -> None:
        if not self.ended:
            self.mover.inbox.append(message)


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


class _Memory:
    """DRAM extents as the daemon knows them."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def listen(self, on_extent: object, on_drop: object) -> None:
        pass

    def extents(self, tier: Tier) -> list[tuple[Any, int]]:
        return [(info, 0) for info in self._owner.store.extents(tier)]


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
        columns = open_columns(machine.tables, machine.table_shape)
        self.columns = columns
        tables = Tables(fd=-1, columns=columns, store=store, fresh=fresh)
        self.owner = _Owner(store=store, config=machine.config, boot_epoch=1)
        self.owner.clock = machine.now_ms
        if fresh:
            for _ in range(machine.shape.dram_extents):
                extent = store.add_extent(
                    tier=Tier.DRAM, device=0, nbytes=machine.shape.dram_slots * SLOT_BYTES
                )
                machine.dram[int(extent)] = bytearray(machine.shape.dram_slots * SLOT_BYTES)
            if nbytes := machine.shape.hbm_slots * SLOT_BYTES:
                extent = store.add_extent(tier=Tier.HBM, device=0, nbytes=nbytes, slot_bytes=SLOT_BYTES)
                machine.hbm[int(extent)] = bytearray(nbytes)
        self.movers = Movers(
            owner=self.owner,
            kept=_Kept(machine),  # type: ignore[arg-type]
            memory=_Memory(self.owner),  # type: ignore[arg-type]
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
        self.starts = [PathStart() for _ in machine.config.nvme]
        self.work = [
            *(
                self.loop.create_task(self.movers.run_path(number, machine.config.nvme[number], start))
                for number, start in enumerate(self.starts)
            ),
            self.loop.create_task(self.owner.tick_forever()),
            self.loop.create_task(self._sweep()),
        ]
        self.movers.serving = True

    def _start_link(self, config: wire.Config, *, lock_fd: int | None = None) -> MoverLink:
        mover = SimMover(self.machine, config.directory)
        self.machine.movers.append(mover)
        link = Link(mover)
        self.links.append(link)
        self.machine.pidfds[link.pidfd] = mover
        return link

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.movers.commit_soon()

    def die(self) -> None:
        """The process is gone: its sockets are at end of file."""
        self.loop.die()
        for link in self.links:
            if not link.mover.eof:
                link.mover.end_of_file()


class Machine:
    """See the module."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.now_s = 0.0
        self.hung_until_s = 0.0
        self.disk = SimDisk(random.Random(self.rng.random()), self._disk_point)
        self.index_files = {folder: IndexFile() for folder in shape.folders}
        self.boot = 1
        self.dram: dict[int, bytearray] = {}
        self.hbm: dict[int, bytearray] = {}
        self.tables: memoryview | None = None
        self.kept: dict[str, int] = {}
        self.movers: list[SimMover] = []
        self.pidfds: dict[int, SimMover] = {}
        self.null_fd = os.open("/dev/null", os.O_RDONLY)
        self.table_shape = TableShape(
            max_rows=512,
            hbm_slots=max(1, shape.hbm_slots),
            dram_slots=shape.dram_extents * shape.dram_slots,
            nvme_slots=2 * shape.paths * (shape.slabs + 1) * shape.slab_slots,
            devices=1,
            max_extents=32,
            max_sessions=6,
            max_namespaces=8,
        )
        self.config = ServeConfig(
            socket="/sim/kvstore.sock",
            nvme=tuple(NvmePath(path=folder, capacity_bytes=64 << 20) for folder in shape.folders),
            durability=shape.durability,
        )
        self.trace: deque[str] = deque(maxlen=60)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        """Faults of ours that a mover has said."""
        self._number = 1 << 26
        self._fuse: int | None = None
        self._death = Death.DAEMON
        self._in_mover = False
        self._buried: list[Life] = []
        """Lives that are over. Kept, as their coroutines would do things on their way out that no dead process does."""
        self.on_operation: Callable[[str], None] = lambda operation: None
        for module in _CLOCKED:
            module.time = _Clock(self)  # type: ignore[attr-defined, assignment]
        self.life = Life(self)

    def close(self) -> None:
        """Gives back the few descriptors that are real."""
        self.life.die()
        for link in self.life.links:
            if link.pidfd >= 0:
                os.close(link.pidfd)
        for name, fd in self.kept.items():
            if name == SlabTable.NAME:
                os.close(fd)
        os.close(self.null_fd)
        for life in (*self._buried, self.life):
            life.loop.close_tasks()
        for module in _CLOCKED:
            module.time = time  # type: ignore[attr-defined]
        self._buried.clear()

    # ------------------------------------------------------------ what everything asks

    def now_ms(self) -> int:
        return START_MS + int(self.now_s * 1000)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def note(self, text: str) -> None:
        """One line for whoever reads a failure."""
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def memory(self, tier: Tier) -> dict[int, bytearray]:
        """Extents of a tier that is memory."""
        return self.hbm if tier is Tier.HBM else self.dram

    def latency_s(self) -> float:
        """What a call to the disk takes: mostly nothing to speak of, at times as long as everything around it."""
        return self.rng.expovariate(200.0) if self.rng.random() < 0.2 else 0.0

    def readable(self, fd: int) -> bool:
        """Whether a descriptor of the daemon is readable: a link, or the pidfd of a mover that has ended."""
        if fd in self.pidfds:
            return self.pidfds[fd].exited
        return any(link.readable for link in self.life.links if link.fileno() == fd)

    # ------------------------------------------------------------ deaths

    def arm(self, death: Death, points: int) -> None:
        """Somebody dies at the so-manieth point from now: a step, a write to the tables, an operation of the disk."""
        self._death, self._fuse = death, points

    def disarm(self) -> None:
        """Nobody dies for now."""
        self._fuse = None

    @property
    def armed(self) -> bool:
        """Whether somebody is to die."""
        return self._fuse is not None

    def _burn(self) -> bool:
        if self._fuse is None:
            return False
        self._fuse -= 1
        return self._fuse < 0

    def store_point(self, name: str) -> None:
        """Between two writes to the tables."""
        if self._death is not Death.MOVER and self._burn():
            self.note(f"death at {name}")
            raise Crash

    def _disk_point(self, operation: str) -> None:
        self.on_operation(operation)
        if self._burn() and (self._in_mover or self._death is not Death.MOVER):
            if self._in_mover and self._death is Death.DAEMON:
                return  # it dies at the next step
            self.note(f"death before {operation}")
            raise Crash

    # ------------------------------------------------------------ the scheduler

    def step(self) -> bool:
        """Lets one thing happen. Whether anything but time could."""
        if self._burn():
            self.note("death between steps")
            self._die()
            return True
        if self.shape.flips and self.rng.random() < self.shape.flips and self.disk.flip_bit():
            self.counts["flips"] += 1
        loop = self.life.loop
        choices: list[Callable[[], None]] = []
        if loop.ready:
            choices += [self._callback] * 3
        if loop.jobs:
            choices.append(self._job)
        if loop.readable():
            choices.append(self._poll)
        io = [choice for mover in self.movers for choice in mover.choices()]
        choices += [functools.partial(self._in_a_mover, choice) for choice in io]
        if not choices or self.rng.random() < 0.03:
            choices = [self._pass_time]
        choice = choices[self.rng.randrange(len(choices))]
        busy = choice != self._pass_time
        self.now_s += self.rng.random() * 2e-4
        self.guarded(choice)
        return busy

    def guarded(self, call: Callable[[], None]) -> None:
        """Does it on the daemon's loop; if somebody dies in it, the survivors go on."""
        asyncio._set_running_loop(self.life.loop)
        try:
            call()
        except Crash:
            self._die()
        finally:
            asyncio._set_running_loop(None)
        if self._fuse is not None and self._fuse < 0:  # it was caught where it was raised, as a task does
            self._die()

    def _callback(self) -> None:
        self.life.loop.run_one()

    def _job(self) -> None:
        self.life.loop.run_job(self.rng.randrange(self.life.loop.jobs))

    def _in_a_mover(self, choice: Callable[[], None]) -> None:
        self._in_mover = True
        try:
            choice()
        finally:
            self._in_mover = False
        if self._fuse is None:
            self.movers = [mover for mover in self.movers if not mover.exited]

    def _poll(self) -> None:
        self.life.loop.poll()

    def _pass_time(self) -> None:
        """Up to the next timer, or the end of something that the disk is at."""
        due = [ends_s for mover in self.movers for ends_s, _ in mover.running if ends_s > self.now_s]
        timer_s = self.life.loop.next_timer_s()
        if timer_s is not None:
            due.append(timer_s)
        if due:
            self.now_s = max(self.now_s, min(due)) + 1e-6
        self.life.loop.fire()

    def _die(self) -> None:
        death, self._fuse = self._death, None
        self.counts[death.value] += 1
        self.note(f"{death.value} dies")
        if death is Death.MOVER:
            if self.movers:
                self.movers.pop(self.rng.randrange(len(self.movers))).kill()
            return
        self.on_death(death)
        self.life.die()
        self._buried.append(self.life)
        for link in self.life.links:  # a dead process's descriptors; the keeper has its own
            if link.pidfd >= 0:
                os.close(link.pidfd)
        if death is Death.DAEMON:
            self._hand_over()
        else:
            for mover in self.movers:
                mover.kill()
            self.movers.clear()
            self.pidfds.clear()
            os.close(self.kept.pop(SlabTable.NAME))
            self.kept.clear()
            self.tables = None
            self.dram.clear()
            self.hbm.clear()
            self.hung_until_s = 0.0
            if death is Death.POWER:
                self.disk.power_cut()
                for index_file in self.index_files.values():
                    index_file.power_cut()
                self.boot += 1
                self.now_s += 1.0
        self._revive()

    def _hand_over(self) -> None:
        """The keeper gives the next daemon what it holds."""
        by_name = {name: self.pidfds[fd] for name, fd in self.kept.items() if name.startswith("mover-")}
        self.pidfds = {}
        for name, mover in by_name.items():
            self.kept[name] = os.dup(self.null_fd)
            self.pidfds[self.kept[name]] = mover

    def _revive(self) -> None:
        asyncio._set_running_loop(None)
        self.life = Life(self)
        self.on_life()

    on_death: Callable[[Death], None] = staticmethod(lambda death: None)
    on_life: Callable[[], None] = staticmethod(lambda: None)

    # ------------------------------------------------------------ the disk's side of a start

    def open_path(self, path: NvmePath, config: ServeConfig, secret: bytes, *, read_index: bool) -> FoundPath:
        """As kvstore.daemon.nvme.open_path, in its order, on this disk."""
        if any(mover.folder == path.path and not mover.exited for mover in self.movers):
            raise AlreadyExists("in use by a mover", retry_after_s=0.1)
        directory = NvmeDirectory(Path(path.path), -1, disk=self.disk)
        plan = SlabPlan(
            slabs=self.shape.slabs, slab_bytes=self.shape.slab_bytes, map_bytes=self.shape.map_bytes
        )
        slabs = directory.slabs()

        def find() -> FoundRecords:
            records = self._recover(path.path)
            return FoundRecords(records, slabs, {})

        return FoundPath(
            directory=directory,
            plan=plan,
            slabs=tuple(slabs),
            find=find if read_index else None,
            open_index=lambda: self._open_or_rebuild(path.path),  # type: ignore[arg-type,return-value]
        )

    def _recover(self, folder: str) -> np.ndarray:
        index_file, map_bytes = self.index_files[folder], self.shape.map_bytes
        return recover_on(folder, self.disk, index_file, self.boot, map_bytes, self._disk_point)

    def _open_or_rebuild(self, folder: str) -> IndexTwin:
        try:
            if not self.index_files[folder].exists:
                raise Corruption("there is no index")
            return self._open_index(folder)
        except Corruption:
            return self._open_index(folder, IndexTwin.anew)

    def _open_index(self, folder: str, make: Callable[..., IndexTwin] = IndexTwin) -> IndexTwin:
        return make(
            self.index_files[folder],
            map_bytes=self.shape.map_bytes,
            synced=self.shape.durability is Durability.POWER,
            boot=self.boot,
            before=self._disk_point,
        )


def recover_on(
    folder: str,
    disk: SimDisk,
    index_file: IndexFile,
    boot: int,
    map_bytes: int,
    before: Callable[[str], None],
) -> np.ndarray:
    """What `tiers.nvme.recover` finds, in its order: the index, or else the trailers and a new index."""
    directory = Path(folder)
    slabs = list_slabs(directory, disk)
    cleared = read_cleared(directory, disk)
    try:
        records = keep_known(index_file.load(boot), slabs)
        return without_cleared(records, cleared)
    except Corruption:
        records = without_cleared(scan_slabs(directory, slabs, disk), cleared)
        index = IndexTwin.anew(index_file, map_bytes=map_bytes, synced=True, boot=boot, before=before)
        index.commit(records, np.empty(0, dtype=SLOT_REF))
        index.complete()
        index.close()
        return records


__all__ = ["Crash", "Death", "Life", "Link", "Machine", "Shape", "SimMover", "Wrong", "recover_on"]
