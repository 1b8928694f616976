"""The simulated machine: a fixed set of histories, that a seed is one history, and that it finds what it is for."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.daemon import movers as movers_module
from kvstore.daemon.nvme import FoundPath
from kvstore.daemon.outstanding import Outstanding
from kvstore.daemon.path_resizable import PathResizable
from kvstore.daemon.slab_answers import SlabAnswers
from kvstore.errors import KvstoreError
from kvstore.layout import MOVER_BIT
from kvstore.leases.waiting import Waits
from kvstore.mover.process import Mover
from kvstore.moves import U32, MoveStatus
from kvstore.tables.checksums import Checksums
from kvstore.tables.slots import SlotPool
from kvstore.trust.watching import Watching
from kvstore.wire import mover as wire
from kvstore.wire.packed import REPLY
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.simulation.clients import Clients
from tests.simulation.disk import SimDisk
from tests.simulation.machine import Machine
from tests.simulation.mover import SimMover
from tests.simulation.plan import Plan, plan_of
from tests.simulation.run import Totals, run_seed
from tests.simulation.scenario import Scenario
from tests.simulation.shape import SLOT_BYTES, Shape, Wrong
from tiers.nvme import carry
from tiers.nvme.capacity import SlabPlan
from tiers.nvme.cleared import EVERY_NAMESPACE, read_cleared
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.index import NoIndex
from tiers.nvme.slab import Slab, SlabFile, open_slab
from tiers.nvme.trailer import Trailer

_EACH_PLAN = range(1, 14)
_STEPS = 1000
_FOLDER = Path("/sim/nvme")


@pytest.mark.parametrize("seed", _EACH_PLAN)
def test_whatever_dies_no_block_is_wrong_or_lost(seed: int) -> None:
    """One short history of each plan; `make simulate` runs thousands of deaths."""
    totals = Totals()
    run_seed(seed, _STEPS, totals)
    aside = plan_of(seed)[1].asides > 0
    assert totals.crashes > (10 if aside else 5)
    assert totals.counts["read" if aside else "served"] > 0


def test_a_seed_is_one_history() -> None:
    """A seed that failed did not fail again: its history hung on addresses and on the real clock."""
    traces = []
    for _ in range(2):
        scenario = Scenario(2, plan_of(2)[1])
        lines: list[str] = []
        scenario.machine.note = lines.append  # type: ignore[method-assign]
        scenario.run(400)
        scenario.close()
        traces.append((lines, scenario.machine.now_s, scenario.machine.disk.operations))
    assert traces[0] == traces[1]


def test_a_clear_that_a_path_has_not_noted_says_so_and_is_noted_later() -> None:
    """A clear was answered while a path was away; killed before that came, the daemon had nobody who knew of it."""
    machine = Machine(1, Shape(paths=2))
    away = SimMover(machine, machine.shape.folders[1], machine.shape.room_of(machine.shape.slabs))
    machine.movers.append(away)  # of a daemon before: it has the lock
    run_until(machine, machine.life.starts[0].loaded.is_set)
    clear = machine.life.admin.clear(pb.ClearRequest(namespace=0xFFFFFFFF))
    task = machine.life.loop.create_task(clear)
    run_until(machine, task.done)
    assert "nvme1 is not in service" in str(task.exception())
    away.exit()
    run_until(machine, machine.life.starts[1].loaded.is_set)
    for folder in machine.shape.folders:
        assert EVERY_NAMESPACE in read_cleared(Path(folder), machine.disk)
    machine.close()


def test_no_power_cut_brings_back_what_a_smaller_path_has_deleted() -> None:
    """A path that had reached its smaller size was larger than that again after a power cut, until the next start."""
    machine = Machine(1, Shape())
    run_until(machine, machine.life.starts[0].loaded.is_set)
    clients = Clients(machine)

    def filled() -> bool:
        with contextlib.suppress(KvstoreError):
            machine.guarded(clients.act)
        return _slabs_after_cuts(machine.disk) == {3}

    run_until(machine, filled)
    task = machine.life.loop.create_task(machine.life.resize_path(0, 1))
    run_until(machine, task.done)
    assert task.result()
    assert max(_slabs_after_cuts(machine.disk)) <= 1
    machine.close()


def test_a_start_forgets_slabs_before_it_deletes_them_for_good() -> None:
    """Killed in between, a start with a smaller size left an index with which no strict recovery would start again."""
    disk = SimDisk(random.Random(1))
    for number in (1, 2, 3):
        open_slab(_FOLDER, number, 8 * SLOT_BYTES, SLOT_BYTES, disk=disk).close()
    directory = NvmeDirectory(_FOLDER, -1, disk=disk)
    there: list[int] = []

    class Index(NoIndex):
        def drop_slab(self, slab: int) -> None:
            there.append(len(directory.slabs()))

    plan = SlabPlan(slabs=1, slab_bytes=8 * SLOT_BYTES, map_bytes=1 << 20)
    found = FoundPath(directory=directory, plan=plan, slabs=(), find=None, open_index=Index)
    found.open(directory.slabs()[:2])
    assert there == [3, 3]
    assert _slabs_after_cuts(disk) == {1}


def _slabs_after_cuts(disk: SimDisk) -> set[int]:
    """How many slabs there may be if the power goes now."""
    counts = set()
    for seed in range(16):
        twin = disk.copy(random.Random(seed))
        twin.power_cut()
        counts.add(sum("/slab-" in name for name in twin.names))
    return counts


def run_until(machine: Machine, done: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if done():
            return
        machine.step()
    pytest.fail("it does not happen")


# ------------------------------------------------------------ broken on purpose

Break = Callable[[pytest.MonkeyPatch], None]


def syncs_do_nothing(patch: pytest.MonkeyPatch) -> None:
    """The data is published and entered into the index before it is on the medium."""
    patch.setattr(SimDisk, "fdatasync", lambda disk, fd: None)


def failed_syncs_count(patch: pytest.MonkeyPatch) -> None:
    """A sync that failed is answered as if it had not."""

    def sync(mover: Mover, number: int) -> None:
        with contextlib.suppress(OSError):
            mover._storage.sync()
        mover._send_held()
        mover._send(wire.Synced(id=number, text=""))

    patch.setattr(Mover, "_sync", sync)


def the_next_sync_makes_good(patch: pytest.MonkeyPatch) -> None:
    """Writes that were under way when a sync failed count once the next one goes well."""
    patch.setattr(Outstanding, "newest", 0)


def replies_before_data(patch: pytest.MonkeyPatch) -> None:
    """A write is answered before it is done."""

    def write(mover: Mover, piece: np.ndarray) -> None:
        replies = np.zeros(len(piece), dtype=REPLY)
        replies["id"], replies["status"] = piece["id"], MoveStatus.OK
        mover._queue.write_done()
        mover._send_replies(replies)
        machine = mover.machine  # type: ignore[attr-defined]
        later = machine.now_s + 0.05
        mover.running.append((later, lambda: mover._storage.transfer(piece)))  # type: ignore[attr-defined]

    patch.setattr(Mover, "_write", write)


def no_checksum(patch: pytest.MonkeyPatch) -> None:
    """The payload is not looked at."""
    patch.setattr(carry, "checksum", lambda payload: bytes(16))


def unread_counts_as_read(patch: pytest.MonkeyPatch) -> None:
    """What a mover has not looked at is given out as if it had."""
    patch.setattr(Checksums, "note_unread", Checksums.note)


def the_first_word_ends_a_checksum(patch: pytest.MonkeyPatch) -> None:
    """A block that one engine finds wrong has no checksum any more, and others that were given it compare nothing."""
    real = Watching.differed

    def differed(watching: Watching, slots: U32, how: str) -> None:
        real(watching, slots, how)
        watching._state.checksums.forget(slots)

    patch.setattr(Watching, "differed", differed)


def no_identity(patch: pytest.MonkeyPatch) -> None:
    """Whatever block a slot holds now is taken for the one that was asked for."""
    real = carry._trailer

    def trailer(*args: object, like: Trailer | None = None, **more: object) -> Trailer:
        made = real(*args, like=like, **more)  # type: ignore[arg-type]
        return made if like is None else like._replace(checksum=made.checksum)

    patch.setattr(carry, "_trailer", trailer)


def clears_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    """A clear is answered before it is anywhere but in memory."""
    patch.setattr(movers_module, "note_cleared", lambda folder, news, disk: None)


def movers_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A DRAM slot may be given away while a mover reads it or writes to it."""
    real = SlotPool.hold

    def hold(pool: SlotPool, slots: np.ndarray, holder: np.uint64) -> None:
        if int(holder) >> MOVER_BIT == 0:
            real(pool, slots, holder)

    patch.setattr(SlotPool, "hold", hold)


def deleted_slabs_go_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """What goes into a file without a name counts as written."""

    async def deleted(answers: SlabAnswers, directory: NvmeDirectory) -> dict[int, int]:
        return {}

    patch.setattr(Slab, "is_deleted", lambda slab: False)
    patch.setattr(SlabAnswers, "deleted", deleted)


def slabs_that_left_stay(patch: pytest.MonkeyPatch) -> None:
    """A path that became smaller keeps the files."""

    async def delete(path: PathResizable, extent: int, file: SlabFile) -> None:
        pass

    patch.setattr(PathResizable, "_delete", delete)


def wake_ups_are_missed(patch: pytest.MonkeyPatch) -> None:
    """Who waits for a block that comes is told of one in two."""
    real, count = Waits.resolved, itertools.count()

    def resolved(waits: Waits, rows: np.ndarray) -> None:
        if next(count) % 2:
            real(waits, rows)

    patch.setattr(Waits, "resolved", resolved)


_BROKEN: tuple[tuple[Break, Plan], ...] = (
    (syncs_do_nothing, Plan(shape=Shape())),
    (failed_syncs_count, Plan(shape=Shape(sync_error=0.3))),
    (
        the_next_sync_makes_good,
        Plan(shape=Shape(sync_error=0.4), flushes=0.05, clears=0.0, points_between=2000),
    ),
    (replies_before_data, Plan(shape=Shape())),
    (no_checksum, Plan(shape=Shape())),
    (
        unread_counts_as_read,
        Plan(shape=Shape(flips=0.05, comparing=0.97), clears=0.0, clients=0.3, checks=0.1),
    ),
    (
        the_first_word_ends_a_checksum,
        Plan(
            shape=Shape(flips=0.2, comparing=1.0, devices=2),
            clears=0.0,
            clients=0.6,
            checks=0.1,
            asides=0.0,
            points_between=4000,
        ),
    ),
    (no_identity, Plan(shape=Shape())),
    (clears_are_not_noted, Plan(shape=Shape(), clears=0.01)),
    (
        deleted_slabs_go_unnoticed,
        Plan(shape=Shape(), deletes=0.02, clears=0.0, flushes=0.1, asides=0.0, points_between=800),
    ),
    (
        slabs_that_left_stay,
        Plan(
            shape=Shape(slab_slots=6), resizes=0.02, asides=0.0, points_between=4000, checks=0.1, flushes=0.05
        ),
    ),
    (wake_ups_are_missed, plan_of(11)[1]),
    (movers_hold_nothing, Plan(shape=Shape(dram_extents=1, dram_slots=12, hang=0.05), clients=0.3)),
)


@pytest.mark.parametrize("broken, plan", _BROKEN, ids=[broken.__name__ for broken, _ in _BROKEN])
def test_it_finds_what_it_is_for(broken: Break, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that cannot fail proves nothing: each of these faults is found within a few histories."""
    broken(monkeypatch)
    for seed in range(1, 13):
        try:
            run_seed(seed, 3000, Totals(), plan=plan)
        except Wrong:
            return
    pytest.fail(f"12 histories with a store in which {broken.__doc__} have shown nothing wrong")
