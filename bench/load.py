"""Clients that keep a daemon busy, each a process of its own, so that none takes the GIL of the one that measures.

    python -m bench.load ROLE {"socket": …, "seconds": …, …}

A client prints `ready`, waits for a line on its standard input, works until its time is over or its standard input is
closed, and prints one JSON object. Roles: `calls`
acquires chains that are cached; `matches` looks them up in the mapped tables; `store` stores new chains without end,
so that the HBM tier evicts all the time; `promote` reads blocks back from disk through a DRAM tier that is too small
for them, so that movers read and the DRAM tier evicts all the time.
"""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from bench.blocks import ANSWER_S, LARGE, SMALL, chains, copies_of, fill, parts, store_chain
from kvstore.client import Changed, Client, DeviceSpec, Namespace, Session, Targets
from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.moves import Grant, Outcome

__all__ = ["LoadPlan", "Worker", "spawn"]

U64 = NDArray[np.uint64]

_READY_S = 300.0
_AHEAD = 2  # chains that are prefetched while one is awaited
_ROOM = 64
_NO_CREDIT = Targets(credit=0, room=0, breaker_s=ANSWER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a client does. `blocks` is the length of one chain, `prefix` how much of a cached one a call asks for."""

    socket: str
    seconds: float
    blocks: int
    chains: int
    """Chains that are cached (or, for `promote`, stored first)."""
    hbm_bytes: int
    prefix: int = 1 << 20
    seed: int = 1


class Worker:
    """A running client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def await_ready(self) -> None:
        """Returns when it has attached and prepared. Raises: KvstoreError when it ended instead."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise KvstoreError(f"a load client ended with code {self._process.wait()}")

    def go(self) -> None:
        """Starts its work."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def running(self) -> bool:
        """Whether it still works."""
        return self._process.poll() is None

    def result(self, timeout_s: float) -> Mapping[str, float]:
        """Tells it to end after its current piece of work; what it did. Raises: KvstoreError when it failed."""
        out, _ = self._process.communicate(timeout=timeout_s)
        if self._process.returncode:
            raise KvstoreError(f"a load client ended with code {self._process.returncode}")
        found = json.loads(out)
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        """Ends it in any case."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def spawn(role: str, plan: LoadPlan, count: int = 1) -> Iterator[list[Worker]]:
    """`count` clients, ready; they have ended at the end of the `with`."""
    with ExitStack() as stack:
        workers = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.load", role, json.dumps(asdict(plan))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).resolve().parent.parent,
            )
            workers.append(Worker(process))
            stack.callback(workers[-1].end)
        for worker in workers:
            worker.await_ready()
        yield workers


def main(role: str, plan: LoadPlan) -> None:
    """The program of a client."""
    geometry = LARGE if role == "promote" else SMALL
    device = DeviceSpec(hbm_bytes=plan.hbm_bytes)
    targets = Targets(credit=0, room=_ROOM, breaker_s=ANSWER_S) if role == "promote" else _NO_CREDIT
    with (
        kvstore.connect(plan.socket, timeout_s=ANSWER_S) as client,
        client.attach(f"bench-{role}", geometry, device, targets=targets) as session,
    ):
        namespace = session.open_namespace(parts(geometry, "bench"))
        work = _ROLES[role](client, session, namespace, plan)
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.monotonic()
        count = 0
        while time.monotonic() - start < plan.seconds and not select.select([sys.stdin], [], [], 0)[0]:
            count += next(work)
        print(json.dumps({"count": count, "seconds": time.monotonic() - start}))


def _prefixes(namespace: Namespace, plan: LoadPlan) -> list[U64]:
    cached = chains(namespace.key, plan.chains * plan.blocks, plan.blocks, seed=plan.seed)
    return [chain[: plan.prefix] for chain in cached]


def _calls(_: Client, session: Session, namespace: Namespace, plan: LoadPlan) -> Iterator[int]:
    """One acquire of a cached chain a step, and its release."""
    for lease, chain in enumerate(itertools.cycle(_prefixes(namespace, plan))):
        grant = session.acquire(namespace, lease + 1, chain)
        grant.result(ANSWER_S)
        grant.abandon()
        session.step()
        yield 1


def _matches(_: Client, session: Session, namespace: Namespace, plan: LoadPlan) -> Iterator[int]:
    """One local match a step; only those that find the whole chain count (a load before may have evicted one)."""
    for chain in itertools.cycle(_prefixes(namespace, plan)):
        yield int(session.match(namespace, chain).hits == len(chain))


def _store(_: Client, session: Session, namespace: Namespace, plan: LoadPlan) -> Iterator[int]:
    """Blocks that nobody has: each chain takes the place of the least recently used ones."""
    for seed in itertools.count(1_000_000 * plan.seed):
        yield fill(session, namespace, chains(namespace.key, plan.blocks, plan.blocks, seed=seed))


def _promote(client: Client, session: Session, namespace: Namespace, plan: LoadPlan) -> Iterator[int]:
    """Stores all chains through DRAM to disk at once; each step then brings one chain back into HBM."""
    stored = chains(namespace.key, plan.chains * plan.blocks, plan.blocks, seed=plan.seed)
    for lease, chain in enumerate(stored):
        grant = store_chain(session, namespace, chain, lease + 1)
        _write_through(session, grant)
        client.flush(_READY_S)
    return _read_back(session, namespace, stored)


def _write_through(session: Session, grant: Grant) -> None:
    """Puts blocks into DRAM; their bytes stay what they are there, since nobody looks at them."""
    for at in range(0, len(grant.hbm_slots), _ROOM // 2):
        hbm, generations = grant.hbm_slots[at : at + _ROOM // 2], grant.hbm_generations[at : at + _ROOM // 2]
        while (room := session.take_room(len(hbm))) is None:
            session.step()
            if not session.wait(ANSWER_S):
                raise DeadlineExceeded(f"no room in DRAM within {ANSWER_S:g} s")
            session.poll()
        session.step(stores=copies_of(hbm, generations, room.slots, room.generations))
        session.drop_dram(room.slots)
        session.drop_hbm(hbm)
        session.step()


def _read_back(session: Session, namespace: Namespace, stored: list[U64]) -> Iterator[int]:
    for lease in itertools.count(1):
        session.prefetch(namespace, lease + _AHEAD, stored[(lease + _AHEAD) % len(stored)])
        chain, held = stored[lease % len(stored)], 0
        while held < len(chain):
            grant = session.acquire(namespace, lease, chain, first=held).result(ANSWER_S)
            cached = grant.outcomes <= Outcome.HIT_DRAM
            hits = len(cached) if cached.all() else int(cached.argmin())
            _load(session, grant, hits)
            held += hits
            if held < len(chain):
                _await_change(session, lease)
        yield len(chain)


def _load(session: Session, grant: Grant, hits: int) -> None:
    """Says that the copies into HBM are done, and lets go of everything."""
    hbm, dram = grant.hbm_slots[:hits], grant.dram_slots[:hits]
    down = grant.outcomes[:hits] == Outcome.HIT_DRAM
    copies = copies_of(dram, grant.dram_generations[:hits], hbm, grant.hbm_generations[:hits])
    session.step(loads=copies[down])
    session.drop_hbm(hbm)
    session.drop_dram(dram[down])
    session.step()


def _await_change(session: Session, lease: int) -> None:
    deadline = time.monotonic() + ANSWER_S
    while session.wait(max(0.0, deadline - time.monotonic())):
        if any(isinstance(event, Changed) and lease in event.leases for event in session.poll()):
            return
    raise DeadlineExceeded(f"a promotion took more than {ANSWER_S:g} s")


_ROLES: Mapping[str, Callable[[Client, Session, Namespace, LoadPlan], Iterator[int]]] = {
    "calls": _calls,
    "matches": _matches,
    "store": _store,
    "promote": _promote,
}

if __name__ == "__main__":
    main(sys.argv[1], LoadPlan(**json.loads(sys.argv[2])))
