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
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.config import Durability, NvmePath, ServeConfig
from kvstore.daemon import movers as movers_module
from kvstore.daemon import space as space_module
from kvstore.daemon.nvme import FoundPath, SlabTable
from kvstore.daemon.space import resized
from kvstore.errors import AlreadyExists, Corruption
from kvstore.layout import TableShape, Tier
from tests.simulation.disk import SimDisk
from tests.simulation.index_twin import IndexFile, IndexTwin
from tests.simulation.life import Life
from tests.simulation.mover import SimMover
from tests.simulation.shape import START_MS, Crash, Death, Shape
from tiers.nvme.capacity import DiskUsage, SlabPlan, disk_usage
from tiers.nvme.cleared import read_cleared, without_cleared
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.index import SLOT_REF, NoIndex
from tiers.nvme.recover import FoundRecords
from tiers.nvme.scan import keep_known, scan_slabs
from tiers.nvme.slab import SlabFile, list_slabs, remove_slabs

__all__ = ["Machine", "recover_on"]


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
        self.memories: list[bytearray] = []
        """All that DRAM ever had, by descriptor."""
        self.dram_extents = shape.dram_extents
        """The size of DRAM, as the keeper holds it."""
        self.hbm: dict[int, bytearray] = {}
        self.tables: memoryview | None = None
        self.kept: dict[str, int] = {}
        self.movers: list[SimMover] = []
        self.pidfds: dict[int, SimMover] = {}
        self.null_fd = os.open("/dev/null", os.O_RDONLY)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.table_shape = TableShape(
            max_rows=512,
            hbm_slots=max(1, shape.hbm_slots) * shape.devices,
            dram_slots=(shape.dram_extents + 1) * shape.dram_slots,
            nvme_slots=2 * shape.paths * (shape.slabs + 1) * shape.slab_slots,
            devices=shape.devices,
            max_extents=32,
            max_sessions=6,
            max_namespaces=8,
        )
        self.config = ServeConfig(
            socket="/sim/kvstore.sock",
            nvme=tuple(
                NvmePath(path=folder, capacity_bytes=shape.capacity_of(shape.slabs))
                for folder in shape.folders
            ),
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
        movers_module.resized = lambda path: resized(path, self.disk)
        space_module.disk_usage = self._usage
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
        os.close(self.wake_fd)
        for life in (*self._buried, self.life):
            life.loop.close_tasks()
        for module in _CLOCKED:
            module.time = time  # type: ignore[attr-defined]
        movers_module.resized, space_module.disk_usage = resized, disk_usage
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
            slabs=self.shape.slabs_of(path.capacity_bytes),
            slab_bytes=self.shape.slab_bytes,
            map_bytes=self.shape.map_bytes,
        )
        slabs = directory.slabs()
        if self.shape.durability is Durability.NONE:
            return self._open_unindexed(directory, plan, slabs, read_index=read_index)

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

    def _open_unindexed(
        self, directory: NvmeDirectory, plan: SlabPlan, slabs: Sequence[SlabFile], *, read_index: bool
    ) -> FoundPath:
        """What the tables do not know is not believed."""
        if read_index:
            remove_slabs(directory.path, slabs, directory.disk)
            slabs = ()
        return FoundPath(directory=directory, plan=plan, slabs=tuple(slabs), find=None, open_index=NoIndex)

    def _usage(self, folder: Path) -> DiskUsage:
        """As tiers.nvme.capacity.disk_usage."""
        sizes = dict(self.disk.files(folder))
        slabs = sum(size for name, size in sizes.items() if name.startswith("slab-"))
        return DiskUsage(
            slab_bytes=slabs,
            index_bytes=self.index_files[str(folder)].nbytes,
            other_bytes=sum(sizes.values()) - slabs,
        )

    def delete_slab(self, folder: str) -> int | None:
        """Somebody deletes a slab's file, whoever has it open: its number; None where there is none."""
        names = sorted(name for name, _ in self.disk.files(Path(folder)) if name.startswith("slab-"))
        if not names:
            return None
        name = self.rng.choice(names)
        quiet, self.disk.before = self.disk.before, lambda operation: None
        self.disk.unlink(Path(folder, name))
        self.disk.before = quiet
        self.note(f"somebody deletes {name}")
        return int(name.split("-")[1])

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
