"""A machine with its engines and its oracle: runs, dies at random points, comes back, and is judged.

`Scenario.run` is the trunk: one history in which deaths follow each other. At operations of the disk it also looks
aside: of the disk as it is at that moment a copy loses its power (or only its processes), is recovered by the real
code, and every block that was found is read. An aside costs no history, so thousands of them fit where tens of
restarts would.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvstore.config import Durability
from kvstore.daemon.write_down import Flushed
from kvstore.errors import KvstoreError
from kvstore.layout import Tier
from kvstore.moves import MoveStatus
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.simulation.asked import Clear, Flush, Resize
from tests.simulation.awaited import check_waits
from tests.simulation.clients import Clients
from tests.simulation.disk import PAGE, Odds
from tests.simulation.life import Life
from tests.simulation.machine import Machine, recover_on
from tests.simulation.oracle import Key, Place, check_memory, in_dram, known, on_path, places, read_records
from tests.simulation.plan import Plan
from tests.simulation.shape import Death, Wrong

_ALL_NAMESPACES = 0xFFFFFFFF
_OPENING_STEPS = 4000


class Scenario:
    """See the module. `run` raises Wrong where the store is."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed = seed
        self.plan = plan
        self.machine = Machine(seed, plan.shape)
        self.rng = random.Random(self.machine.rng.random())
        self.clients = Clients(self.machine)
        self.clients.sealed = self._sealed
        self.promised: dict[Key, Place] = {}
        self.gone: set[Key] = set()
        """Cleared and not stored since: never to be seen again."""
        self.excused: set[Key] = set()
        """Held through a clear, or stored while it was under way: may be a miss after a full restart."""
        self._owed: dict[Key, Place] = {}
        self._stale: dict[Key, Place] = {}
        """Entered by the last start though their slots had been given to other blocks, or were being: misses to be."""
        self._flushes: list[Flush] = []
        self._clears: list[Clear] = []
        self._resize: Resize | None = None
        self._slabs = [plan.shape.slabs] * plan.shape.paths
        """The most slabs that each path may have now: of its old size and its new one, until it has that."""
        self.most_slabs = plan.shape.slabs + (1 if plan.resizes else 0)
        self._every_key = [
            {(int(a), int(b)) for a, b in chain.reshape(-1, 2)} for chain in self.clients.hashes
        ]
        self._judge: Death | None = None
        self._stop: asyncio.Task[Flushed] | None = None
        self._last = Death.POWER
        self._looking = False
        self._failure: Wrong | None = None
        machine = self.machine
        machine.on_death = self._on_death
        machine.on_life = self._on_life
        machine.on_operation = self._on_operation
        self._arm(2 * self.plan.points_between)

    # ------------------------------------------------------------ the trunk

    def run(self, steps: int) -> None:
        """So many steps; after the last one the power goes a last time."""
        for _ in range(steps):
            self.step()
        self.machine.arm(Death.POWER, 0)
        self.step()

    def step(self) -> None:
        """One thing happens, and what it led to is judged."""
        machine = self.machine
        self._let_happen()
        if self._judge is not None:
            self._judge_start()
        elif not machine.armed:
            self._arm(2 * self.plan.points_between)
        if self._failure is not None:
            raise self._failure
        self._answers()
        if self._stop is not None and self._stop.done():
            if self._stop.exception() is not None:
                raise Wrong(f"the daemon did not end: {self._stop.exception()!r}") from self._stop.exception()
            self._stop = None
            machine.arm(self.rng.choice((Death.EVERYTHING, Death.POWER)), 0)
        self._look_at_tasks()
        if self.rng.random() < self.plan.checks:
            self.check()

    def _let_happen(self) -> None:
        """An administrator, somebody who flushes, an engine, or the machine by itself."""
        machine, plan, odds = self.machine, self.plan, self.machine.disk.odds
        for name in ("read_error", "write_error", "short", "sync_error", "no_space"):
            setattr(odds, name, getattr(plan.shape, name))
        chance = self.rng.random()
        if self._stop is not None:
            machine.step()
        elif chance < plan.clears:
            machine.guarded(self._clear)
        elif chance < plan.clears + plan.flushes:
            machine.guarded(self._flush)
        elif chance < plan.clears + plan.flushes + plan.clients:
            machine.guarded(self._act)
        elif chance > 1 - plan.stops:
            machine.guarded(self._stop_in_order)
        elif chance > 1 - plan.stops - plan.resizes:
            machine.guarded(self._begin_resize)
        elif chance > 1 - plan.stops - plan.resizes - plan.deletes:
            self._delete()
        else:
            machine.step()

    def check(self) -> None:
        """All of memory, and what was promised, now."""
        check_memory(self.machine.life)
        check_waits(self.machine.life)
        self.clients.check()
        self._check_promises(places(self.machine.life))
        self._check_size()

    def close(self) -> None:
        """Gives descriptors back."""
        self.machine.close()

    def _arm(self, points: int) -> None:
        deaths, weights = zip(*self.plan.deaths, strict=True)
        self.machine.arm(self.rng.choices(deaths, weights)[0], self.rng.randrange(1, points))

    def _act(self) -> None:
        try:
            self.clients.act()
        except KvstoreError as error:
            self.machine.note(f"refused: {error}")

    # ------------------------------------------------------------ flushes and clears

    def _flush(self) -> None:
        if len(self._flushes) >= 3:
            return
        life = self.machine.life
        self._watch_flushes()
        task = life.loop.create_task(life.movers.flush(5.0))
        self._flushes.append(Flush(task, in_dram(life)))
        self.machine.note("flush begins")

    def _stop_in_order(self) -> None:
        """The daemon is told to end: as its `app` does, and then the processes are gone, or the power."""
        life = self.machine.life
        if not all(start.loaded.is_set() for start in life.starts):
            return
        self._watch_flushes()
        life.owner.draining = True
        self._stop = life.loop.create_task(self._end(life))
        self._flushes.append(Flush(self._stop, in_dram(life)))
        self.machine.note("the daemon is told to end")

    async def _end(self, life: Life) -> Flushed:
        flushed = await life.movers.drain(5.0)
        for task in life.work:
            task.cancel()
        await life.movers.close(5.0)
        self.machine.counts["stops"] += 1
        return flushed

    def _clear(self) -> None:
        if self._clears:
            return
        life = self.machine.life
        life.owner.settling = self._note_kept
        client = self.rng.choice([None, *self.clients.all.values()])
        namespace = _ALL_NAMESPACES if client is None else client.namespace
        task = life.loop.create_task(life.admin.clear(pb.ClearRequest(namespace=namespace)))
        self._clears.append(Clear(task, None if client is None else client.which, set()))
        self.machine.note(f"clear of namespace {'*' if client is None else client.which} begins")

    def _begin_resize(self) -> None:
        life, shape = self.machine.life, self.plan.shape
        if self._resize is not None:
            return
        path = self.rng.choice([None, *range(shape.paths)])
        if path is None:
            wanted = self.rng.randrange(1, shape.dram_extents + 2)
            task = life.loop.create_task(life.resize_dram(wanted))
        else:
            wanted = self.rng.randrange(1, shape.slabs + 2)
            self._slabs[path] = max(self._slabs[path], wanted)
            task = life.loop.create_task(life.resize_path(path, wanted))
        self._resize = Resize(task, path)
        self.machine.counts["resizes"] += 1
        self.machine.note(f"{'dram' if path is None else f'path {path}'} is to have {wanted} extents")

    def _delete(self) -> None:
        """What was promised of it is owed no more; what is promised from now on is."""
        life, path = self.machine.life, self.rng.randrange(self.plan.shape.paths)
        number = self.machine.delete_slab(self.plan.shape.folders[path])
        if number is None:
            return
        self.machine.counts["deletes"] += 1
        of_path = {
            int(info.extent)
            for info in life.store.extents(Tier.NVME)
            if info.device == path and life.movers.slabs.number(info.extent) == number
        }
        extents = life.store._state.nvme.extent
        for promises in (self.promised, self._owed):
            for key in [key for key, place in promises.items() if int(extents[place.slot]) in of_path]:
                del promises[key]
        for flush in self._flushes:
            flush.void = True

    def _note_kept(self) -> None:
        """A clear says that it has called the store."""
        task = asyncio.current_task(self.machine.life.loop)
        for clear in self._clears:
            if clear.task is task and clear.kept is None:
                clear.kept = known(self.machine.life)

    def _sealed(self, key: Key) -> None:
        self.gone.discard(key)
        for clear in self._clears:
            clear.sealed_since.add(key)

    def _answers(self) -> None:
        """Flushes and clears that have been answered."""
        for flush in [flush for flush in self._flushes if flush.task.done()]:
            self._flushes.remove(flush)
            if flush.task.exception() is not None:
                continue
            pending = flush.task.result().pending_blocks
            self.machine.note(f"flush is answered, {pending} pending")
            if pending == 0 and flush.durable is not None and not flush.void:
                self.machine.counts["flushes"] += 1
                self._promise(flush.wanted, flush.durable)
        if self._resize is not None and self._resize.task.done():
            self._resize.task.result()
            self._resize = None
        for clear in [clear for clear in self._clears if clear.task.done()]:
            self._clears.remove(clear)
            keys = self._keys_of(clear)
            if clear.task.exception() is not None:
                self._excuse(keys)
                continue
            self.machine.counts["clears"] += 1
            assert clear.kept is not None
            left = known(self.machine.life) | clear.kept | clear.sealed_since
            self.gone |= keys - left
            self._excuse(keys & left)
            self.machine.note("clear is answered")

    def _promise(self, wanted: set[Key], durable: dict[Key, Place]) -> None:
        """What was durable and has not been let go of since is owed from now on."""
        now = places(self.machine.life)
        if self.plan.no_eviction and (missing := wanted & known(self.machine.life) - set(now)):
            raise Wrong(f"a flush left {len(missing)} blocks in DRAM alone and says that none is pending")
        self.promised |= {
            key: place
            for key, place in durable.items()
            if now.get(key) == place and key not in self.excused and self._stale.get(key) != place
        }

    def _watch_flushes(self) -> None:
        """Notes what the store counts as written whenever a flush begins to make it durable."""
        loop = self.machine.life.loop
        for path in self.machine.life.movers._paths.values():
            real = path.make_durable
            if hasattr(real, "watched"):
                continue

            def watched(real: Callable[[], Awaitable[None]] = real) -> Awaitable[None]:
                task = asyncio.current_task(loop)
                for flush in self._flushes:
                    if flush.task is task:
                        flush.durable = places(self.machine.life)
                return real()

            watched.watched = True  # type: ignore[attr-defined]
            path.make_durable = watched  # type: ignore[method-assign, assignment]

    def _look_at_tasks(self) -> None:
        """A task of the daemon that ended by a fault of ours, or a mover that has met one."""
        if self.machine.faults:
            raise Wrong(f"a mover failed: {self.machine.faults}")
        for task in self.machine.life.work:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise Wrong(f"the daemon failed: {task.exception()!r}") from task.exception()
        if self.machine.life.owner.counters.values()["internal_errors_total"]:
            raise Wrong("the daemon counted an internal error")

    # ------------------------------------------------------------ deaths

    def _on_death(self, death: Death) -> None:
        """What the living store still has of what was promised is owed."""
        self._check_size()
        self._last = death
        if self._judge not in (None, Death.DAEMON):  # it was just starting from the disk: all is owed still
            self._judge = self._judge if death is Death.DAEMON else death
            return
        self._owed = self._owed_now()
        if death is not Death.DAEMON and self._forgotten():
            self._owed = {}
        for clear in self._clears:  # never answered, and perhaps noted all the same
            self._excuse(self._keys_of(clear))
        self._flushes.clear()
        self._clears.clear()
        self._resize = None
        self._stop = None
        self._judge = death

    def _forgotten(self) -> bool:
        """Whether the next start may leave out what was durable: it trusts no disk, or has to make a path smaller."""
        if self.plan.shape.durability is Durability.NONE:
            return True
        resizers = [self.machine.life.movers.path(number) for number in range(self.plan.shape.paths)]
        busy = any(found is None or not found[1].done for found in resizers)
        return bool(self.plan.resizes) and (busy or self._resize is not None)

    def _owed_now(self) -> dict[Key, Place]:
        """What was promised, is in the store still, and is not being cleared."""
        now = places(self.machine.life)
        clearing: set[Key] = set().union(*(self._keys_of(clear) for clear in self._clears))
        return {
            key: place
            for key, place in self.promised.items()
            if now.get(key) == place and key not in clearing
        }

    def _excuse(self, keys: set[Key]) -> None:
        self.excused |= keys
        for key in keys:
            self.promised.pop(key, None)

    def _keys_of(self, clear: Clear) -> set[Key]:
        return set().union(*self._every_key) if clear.which is None else self._every_key[clear.which]

    def _on_life(self) -> None:
        if self._last is Death.DAEMON:
            self.machine.guarded(self.clients.resume)
        else:
            self.clients.vanish()

    def _judge_start(self) -> None:
        """Waits for the path to open, without new faults, and looks at what came back."""
        machine, death = self.machine, self._judge
        assert death is not None
        machine.disk.odds = Odds()
        if self.rng.random() < self.plan.double_deaths:
            self._arm(50)
        for _ in range(_OPENING_STEPS):
            if all(start.loaded.is_set() for start in machine.life.starts):
                break
            machine.step()
            self._look_at_tasks()
        else:
            raise Wrong("the path was not opened again")
        machine.disarm()
        death = self._judge
        self._judge = None
        now = places(machine.life)
        if death is Death.DAEMON:
            self._check_owed(dict.fromkeys(self._owed, MoveStatus.OK), now, death)
        else:
            found = self._read_all()
            self._check_owed(found, now, death)
            self._stale = {key: place for key, place in now.items() if found.get(key) is not MoveStatus.OK}
            self.excused &= set(now)  # the rest is stored anew, if at all
        self.promised = {key: now[key] for key in self._owed if key in now}
        self._check_gone(known(machine.life), death.value)
        self.check()
        self._arm(2 * self.plan.points_between)

    def _read_all(self) -> dict[Key, MoveStatus]:
        """Every block that the store says the disk has, by the real tier."""
        machine = self.machine
        found: dict[Key, MoveStatus] = {}
        for number, folder in enumerate(machine.shape.folders):
            found |= read_records(folder, machine.disk, on_path(machine.life, number))
        return found

    def _check_owed(self, found: dict[Key, MoveStatus], now: dict[Key, Place], death: Death) -> None:
        """Each is readable, and the store knows it, but for what it has evicted since it has started again."""
        self.machine.counts["read"] += len(found)
        self.machine.counts["owed"] += len(self._owed)
        if self.plan.shape.flips:
            return
        evicted = self.machine.life.store.stats().counters.get("evictions_nvme", 0)
        lost = {
            key: found[key].name if key in found else "not found"
            for key in sorted(self._owed)
            if key in now and found.get(key) is not MoveStatus.OK
        }
        if lost:
            raise Wrong(
                f"after {death.value} {len(lost)} of {len(self._owed)} promised blocks are lost: {lost}"
            )
        unknown = set(self._owed) - set(now)
        if len(unknown) > evicted:
            raise Wrong(
                f"after {death.value} the store has not entered {len(unknown) - evicted} promised blocks"
            )

    def _check_gone(self, there: set[Key], what: str) -> None:
        back = self.gone & there
        if back:
            raise Wrong(f"after {what} {len(back)} cleared blocks are back: {min(back)}")

    def _check_promises(self, now: dict[Key, Place]) -> None:
        if self.plan.no_eviction:
            lost = [key for key, place in self.promised.items() if now.get(key) != place]
            if lost:
                raise Wrong(f"{len(lost)} blocks that a flush acknowledged have left the store: {lost[0]}")
        self._check_gone(known(self.machine.life), "nothing")

    def _check_size(self) -> None:
        """Slabs and index, each and together."""
        machine, shape = self.machine, self.machine.shape
        for number, (folder, index_file) in enumerate(machine.index_files.items()):
            slabs_now = self._slabs_of(number)
            room, capacity = shape.room_of(slabs_now), shape.bound_of(slabs_now)
            sizes = dict(machine.disk.files(Path(folder)))
            slabs = sum(size for name, size in sizes.items() if name.startswith("slab-"))
            machine.counts["most_bytes"] = max(machine.counts["most_bytes"], slabs)
            used = sum(-(-size // PAGE) * PAGE for size in sizes.values()) + index_file.nbytes
            if slabs > room or index_file.nbytes > shape.map_bytes or used > capacity:
                raise Wrong(
                    f"{used} bytes in {folder}, {slabs} of them slabs; {capacity} are configured, "
                    f"{room} of them for slabs"
                )

    def _slabs_of(self, number: int) -> int:
        """The most slabs that a path may have now."""
        found = self.machine.life.movers.path(number)
        busy = self._resize is not None and self._resize.path == number
        if found is not None and found[1].done and not busy:
            self._slabs[number] = self.plan.shape.slabs_of(found[0].space.capacity_bytes)
        return self._slabs[number]

    # ------------------------------------------------------------ asides

    def _on_operation(self, operation: str) -> None:
        if self._looking or self._judge is not None or self.rng.random() >= self.plan.asides:
            return
        self._looking = True
        try:
            for death in (Death.POWER, self.rng.choice((Death.EVERYTHING, Death.POWER))):
                self._aside(death, operation)
        except Wrong as error:
            self._failure = self._failure or error  # below us is code that handles what it is raised
        finally:
            self._looking = False

    def _aside(self, death: Death, operation: str) -> None:
        """The same disk, at this moment, after a death; what is found is read."""
        machine = self.machine
        owed = self._owed_now()
        rng = random.Random(self.rng.random())
        disk, boot = machine.disk.copy(rng), machine.boot
        if death is Death.POWER:
            disk.power_cut()
            boot += 1
        found: dict[Key, MoveStatus] = {}
        for folder, kept in machine.index_files.items():
            index_file = kept.copy()
            if death is Death.POWER:
                index_file.power_cut()
            records = recover_on(
                folder, disk, index_file, boot, machine.shape.map_bytes, lambda operation: None
            )
            for key, status in read_records(folder, disk, records).items():
                if found.get(key) is not MoveStatus.OK:
                    found[key] = status
        machine.counts["asides"] += 1
        machine.counts["read"] += len(found)
        machine.counts["owed"] += len(owed)
        good = {key for key, status in found.items() if status is MoveStatus.OK}
        if not machine.shape.flips and (lost := set(owed) - good):
            states = {key: found[key].name if key in found else "not found" for key in sorted(lost)}
            raise Wrong(
                f"aside, {death.value} before {operation}: {len(lost)} of {len(owed)} promised blocks lost: {states}"
            )
        if not self._clears:
            self._check_gone(set(found), f"{death.value} before {operation}, aside,")


__all__ = ["Scenario"]
