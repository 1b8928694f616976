"""Kills every process of a loaded service, at named fault points and at random, and lets the oracle judge.

$KVSTORE_TEST_KILLS sets how many (default 180), $KVSTORE_TEST_SEED which ones.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from kvstore.errors import KvstoreError
from kvstore.units import MIB
from tests.kill.harness import (
    HANG_S,
    Load,
    WorkerSpec,
    planned_service,
    progress,
    told_where,
    within_capacity,
)
from tests.support.daemon import Service, small_config, wait_for
from tests.support.fault_points import fault_points

KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "180"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
KILLS_A_ROUND = 18
_NODE = "tests/kill/test_kills.py::test_everything_may_die_and_nothing_is_wrong"

pytestmark = [pytest.mark.kill, pytest.mark.timeout(600)]

POINTS = fault_points()
DAEMON_POINTS = sorted({*POINTS.store, *POINTS.daemon})
ROUNDS = -(-KILLS // KILLS_A_ROUND)
POINTS_A_ROUND = -(-len(DAEMON_POINTS) // 10)  # ten rounds pass all of them
SESSION_POINTS = [
    "dead.freed",
    "extent.assigned",
    "extent.stored",
    "hello.stored",
    "promotions.unlinked",
    "resume.freed",
]
"""Passed seldom, some of them only when a worker ends or comes."""
assert set(SESSION_POINTS) <= set(DAEMON_POINTS)
ELSEWHERE = {"copy.group", "member.asked", "member.joined", "member.opened", "step.done", "step.launched"}
"""Passed by the engine, by groups of processes and by requests that are alone, and this load is none of them:
`test_launch_kills` kills at `step.launched`, `test_tensor_parallel` at the points of a member, `test_early_admission`
at `copy.group`, nothing at `step.done`."""
assert set(POINTS.worker) >= ELSEWHERE
WORKER_POINTS = sorted(set(POINTS.worker) - ELSEWHERE)
SPECS = (WorkerSpec(), WorkerSpec(), WorkerSpec(device=1, slot_kib=32, family=2))


class Round:
    """One service, its workers, and the kills that it survives."""

    def __init__(self, service: Service, rng: random.Random) -> None:
        self.service = service
        self.kills = 0
        self._rng = rng
        self._pid = service.daemon_pid
        self._loads = [self._start(spec) for spec in SPECS]
        self._gone: list[Load] = []
        self.all_loads: list[Load] = list(self._loads)

    def _start(self, spec: WorkerSpec) -> Load:
        return Load(self.service.socket, spec, self._rng.randrange(1 << 30))

    def begin(self) -> None:
        for load in self._loads:
            load.await_progress()

    def kill_worker(self, fault: str = "") -> None:
        """SIGKILL of a worker, or its own at a fault point; another takes its place."""
        at = self._rng.randrange(len(self._loads))
        load = self._loads[at]
        if fault:
            load.stop()
            load = self._replace(at, fault)
            wait_for(f"the death of {load.name} at {fault}", lambda: not load.running, HANG_S)
            load.check()
        else:
            load.check()
            load.kill()
        self.kills += 1
        self._replace(at, "").await_progress()

    def _replace(self, at: int, fault: str) -> Load:
        self._gone.append(self._loads[at])
        spec = SPECS[at]
        spec = WorkerSpec(device=spec.device, slot_kib=spec.slot_kib, family=spec.family, fault=fault)
        self._loads[at] = self._start(spec)
        self.all_loads.append(self._loads[at])
        return self._loads[at]

    def kill_daemon(self) -> None:
        """SIGKILL of the daemon, unless it has died of its own fault meanwhile."""
        time.sleep(self._rng.random())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._await_daemon()

    def await_fault(self, point: str) -> None:
        """The daemon dies of the fault of this life, or is killed where the load does not pass that point."""
        if point in SESSION_POINTS and _alive(self._pid):
            at = self._rng.randrange(len(self._loads))
            self._loads[at].kill()
            self._replace(at, "")
        until = time.monotonic() + 4.0
        while time.monotonic() < until and _alive(self._pid):
            time.sleep(0.05)
        self.kill_daemon()

    def _await_daemon(self) -> None:
        """Returns when another daemon is ready and all workers go on."""
        within_capacity(self.service.config)
        self._pid = wait_for("another daemon", self._other_daemon, HANG_S)
        within_capacity(self.service.config)
        self.kills += 1
        for load in self._loads:
            load.await_progress()

    def _other_daemon(self) -> int:
        pid = self.service.daemon_pid
        return pid if pid != self._pid and self.service.stats().ready else 0

    def kill_mover(self) -> None:
        pids = wait_for("a mover", self.service.mover_pids, HANG_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        self.kills += 1
        wait_for("another mover", lambda: set(self.service.mover_pids()) - set(pids), HANG_S)

    def kill_keeper(self) -> None:
        before = self.service.keeper_pid
        os.kill(before, signal.SIGKILL)
        self.kills += 1
        wait_for("another keeper", lambda: self.service.keeper_pid not in (0, before), HANG_S)
        time.sleep(0.5)  # it has every descriptor again
        self.check()

    def stop_worker(self) -> None:
        """SIGSTOP past every time-out, while others use the same pages; not counted as a kill."""
        load = self._loads[0]
        load.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        load.process.send_signal(signal.SIGCONT)
        load.await_progress()

    def check(self) -> None:
        """Nothing is wrong now."""
        for load in self.all_loads:
            assert not load.wrong, load.wrong[:3]
        within_capacity(self.service.config)
        with contextlib.suppress(KvstoreError):  # away: it is checked at the end
            assert self.service.faults() == []

    def quiesce(self) -> None:
        """All end in order; then nobody holds anything."""
        for load in self._loads:
            load.await_progress()
        for load in self._loads:
            load.stop()
        wait_for("the end of all sessions", lambda: not self.service.stats().sessions, HANG_S)
        wait_for("the end of all moves", self._still, HANG_S)
        assert self.service.faults() == []
        within_capacity(self.service.config)
        for tier in self.service.stats().tiers:
            leaked = (tier.tier, tier.filling_slots, tier.held_slots)
            assert leaked == (tier.tier, 0, 0), leaked
            assert tier.free_slots + tier.sealed_slots <= tier.slots

    def _still(self) -> bool:
        return all(not tier.filling_slots and not tier.held_slots for tier in self.service.stats().tiers)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _plan(rng: random.Random, number: int, kills: int) -> tuple[list[str], list[str], list[str]]:
    """Faults of the daemon's lives, the points at which it is expected to die, and the actions of the round."""
    actions = ["daemon"] + ["worker"] * 6 + ["worker-point"] * 3 + ["mover"] * 2 + ["keeper"]
    faults = []
    every = random.Random(SEED).sample(DAEMON_POINTS, len(DAEMON_POINTS))
    points = [every[(number * POINTS_A_ROUND + i) % len(every)] for i in range(POINTS_A_ROUND)]
    while len(actions) + len(points) + 1 > kills > 8:
        actions.pop(rng.randrange(len(actions)))
    actions += ["daemon-point"] * len(points)
    rng.shuffle(actions)
    # The next keeper starts the daemon without a plan: behind the last fault, and before another kill of the daemon.
    actions = [action for action in actions if action != "keeper"]
    last = max((i for i, action in enumerate(actions) if action == "daemon-point"), default=0)
    actions[last + 1 : last + 1] = ["keeper", "daemon"]
    left = iter(points)
    for action in actions:
        if action == "daemon-point":
            point = next(left)
            faults.append(f"{point}:kill:{1 if point in SESSION_POINTS else rng.randrange(1, 25)}")
        elif action == "daemon":
            faults.append(
                f"{rng.choice(POINTS.mover)}:kill:{rng.randrange(1, 40)}" if rng.random() < 0.3 else ""
            )
        if faults and rng.random() < 0.12:
            faults.append(f"{rng.choice(POINTS.recovery)}:kill")
    actions.insert(rng.randrange(len(actions)), "stop")
    return faults, points, actions


@pytest.mark.parametrize("number", range(ROUNDS))
def test_everything_may_die_and_nothing_is_wrong(tmp_path: Path, number: int) -> None:
    rng = random.Random(SEED * 1000 + number)
    faults, points, actions = _plan(rng, number, min(KILLS_A_ROUND, KILLS - number * KILLS_A_ROUND))
    config = small_config(
        tmp_path,
        nvme_bytes=64 * MIB,
        dram_bytes=16 * MIB,
        dram_extent_bytes=4 * MIB,
        nvme_extent_bytes=8 * MIB,
        devices=2,
    )
    again = f"KVSTORE_TEST_SEED={SEED} KVSTORE_TEST_KILLS={KILLS} pytest -m kill {_NODE}[{number}]"
    progress(
        f"\nround {number} of {ROUNDS}, seed {SEED}: {len(actions) - 1} kills; "
        f"faults of the daemon's lives: {', '.join(fault or 'none' for fault in faults)}"
    )
    with told_where(f"again: {again}"), planned_service(config, faults) as service:
        played = Round(service, rng)
        try:
            with told_where("before the first kill"):
                played.begin()
            for at, action in enumerate(actions):
                began = time.monotonic()
                point = ""
                if action == "daemon-point":
                    point = points.pop(0)
                elif action == "worker-point":
                    point = f"{rng.choice(WORKER_POINTS)}:kill:{rng.randrange(1, 60)}"
                step = f"round {number}, {at + 1} of {len(actions)}: {action} {point}".rstrip()
                with told_where(f"{step}; planned faults {faults}"):
                    _carry_out(played, action, point)
                progress(f"{step}, {time.monotonic() - began:.1f} s")
            with told_where(f"round {number}, after its kills; planned faults {faults}"):
                played.quiesce()
                assert played.kills == len(actions) - 1
            progress(f"round {number}: {played.kills} kills, {_summary(played)}")
        finally:
            for load in played.all_loads:
                load.end()


def _carry_out(played: Round, action: str, point: str) -> None:
    """One kill, and that all goes on after it. `point`: the fault point at which somebody dies by itself."""
    match action:
        case "daemon":
            played.kill_daemon()
        case "daemon-point":
            played.await_fault(point)
        case "worker" | "worker-point":
            played.kill_worker(point)
        case "mover":
            played.kill_mover()
        case "keeper":
            played.kill_keeper()
        case _:
            played.stop_worker()
    played.check()


def _summary(played: Round) -> str:
    hits: dict[str, int] = {}
    for load in played.all_loads:
        for tier, blocks in load.by_tier.items():
            hits[tier] = hits.get(tier, 0) + blocks
    return f"{sum(load.requests for load in played.all_loads)} requests, hits {hits}"
