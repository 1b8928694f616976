"""`kvstore bench lookup`: how long it takes to find and to lease a long cached prompt, and how many a second.

A real daemon in a temporary folder holds a million blocks of 4 KiB in its HBM twin, stored over the stream as an engine
stores them, in chains of 4,096 (a block's size does not matter here: no byte of it is looked at). `match` is the local
lookup in the mapped tables; `call` is one acquire over the stream, from the call to the grant in hand, its release not
counted. `random` looks up blocks of all chains in random order instead of chains. Loaded means: another client reads
blocks back from disk, as fast as it goes, through DRAM and HBM tiers too small for them, so movers and eviction never
rest; `storing` adds one that stores new blocks as fast as it goes, each in the place of one that is evicted. The eight
clients are eight processes, each with 1,024 chained blocks a call (32k tokens at 32 tokens a block). The ratio of 10 M
to 10 k rows is taken on the store alone, in this process.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from bench.blocks import ANSWER_S, SMALL, chains, fill, parts
from bench.calls import Caller
from bench.control import CONTROL_HBM_BYTES, ControlPlane, measure_control_plane
from bench.load import LoadPlan, spawn
from bench.loaded import HBM_BYTES, Loaded, measure_loaded
from bench.scale import scale_ratio
from bench.service import Service, serve
from bench.timing import median
from kvstore.client import DeviceSpec, Targets
from kvstore.layout import table_bytes

__all__ = ["FULL", "SHORT", "LookupPlan", "LookupResult", "Pair", "Rates", "measure"]

U64 = NDArray[np.uint64]

_CHAIN = 4096
_LENGTHS = (1024, 4096)
_EXTENT_BYTES = 64 << 20
_SPARE_SLOTS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupPlan:
    """Sizes of one run."""

    rows: int
    max_rows: int
    samples: int
    loaded_samples: int
    clients: int
    seconds: float
    """Of each throughput."""
    disk_chains: int
    """Chains of 64 large blocks that are read back while loaded; more of them than DRAM has room for."""
    dram: str
    nvme: str
    scale_rows: tuple[int, int]
    control_tokens: int = 131_072


FULL = LookupPlan(
    rows=1_000_000,
    max_rows=1 << 20,
    samples=300,
    loaded_samples=1000,
    clients=8,
    seconds=5.0,
    disk_chains=24,
    dram="512MiB",
    nvme="4GiB",
    scale_rows=(10_000, 10_000_000),
)
SHORT = LookupPlan(
    rows=50_000,
    max_rows=1 << 17,
    samples=40,
    loaded_samples=100,
    clients=8,
    seconds=1.0,
    disk_chains=6,
    dram="256MiB",
    nvme="1GiB",
    scale_rows=(10_000, 100_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Medians for prompts of 1,024 and of 4,096 blocks, in milliseconds."""

    match_ms: dict[str, float]
    call_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A second, of one client and of all of them together."""

    one: float
    many: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """What was measured. Times are milliseconds."""

    chained: Pair
    random: Pair
    loaded: Loaded
    storing: Loaded
    clients: int
    """How many the rates of "8 clients" were taken with: 8 but in tests."""
    calls_per_s: Rates
    matches_per_s: Rates
    control_plane: ControlPlane | None
    scale_ratio_10k_to_10m: float
    index_bytes_per_block: float
    daemon_private_bytes_per_block: float

    def to_json(self) -> dict[str, object]:
        """The object that `--json` prints."""
        return {
            "match_ms": self.chained.match_ms,
            "call_ms": self.chained.call_ms,
            "call_p99_ms_loaded": self.loaded.call_p99_ms,
            "calls_per_s_1_client": self.calls_per_s.one,
            "calls_per_s_8_clients": self.calls_per_s.many,
            "matches_per_s_1_client": self.matches_per_s.one,
            "matches_per_s_8_clients": self.matches_per_s.many,
            "clients": self.clients,
            "control_plane": None if self.control_plane is None else asdict(self.control_plane),
            "scale_ratio_10k_to_10m": self.scale_ratio_10k_to_10m,
            "index_bytes_per_block": self.index_bytes_per_block,
            "random": {"match_ms": self.random.match_ms, "call_ms": self.random.call_ms},
            "daemon_private_bytes_per_block": self.daemon_private_bytes_per_block,
            "loaded": asdict(self.loaded),
            "storing": asdict(self.storing),
        }


def measure(plan: LookupPlan, say: Callable[[str], None], parent: Path | None = None) -> LookupResult:
    """Runs everything, in a minute or two. `say` is told what is being done; `parent` is where storage is made.

    Raises: Unavailable when the daemon does not start, KvstoreError when it does not answer as it must.
    """
    say(f"the store alone at {plan.scale_rows[0]:,} and {plan.scale_rows[1]:,} rows")
    ratio = scale_ratio(*plan.scale_rows, samples=plan.samples)
    hbm_bytes = _hbm_bytes(plan)
    settings = {
        "max_rows": str(plan.max_rows),
        "hbm": str(hbm_bytes + HBM_BYTES + CONTROL_HBM_BYTES + 3 * _EXTENT_BYTES),
        "min_slot": "4KiB",
        "dram": plan.dram,
        "nvme": "{folder}/nvme:" + plan.nvme,
    }
    say("starting a daemon")
    with serve(settings, parent) as service, kvstore.connect(service.socket, timeout_s=ANSWER_S) as client:
        targets = Targets(credit=0, room=0, breaker_s=ANSWER_S)
        with client.attach(
            "bench-lookup", SMALL, DeviceSpec(hbm_bytes=hbm_bytes), targets=targets
        ) as session:
            namespace = session.open_namespace(parts(SMALL, "bench"))
            caller = Caller(session=session, namespace=namespace)
            run = _Run(plan=plan, say=say, service=service, caller=caller)
            return _measure_daemon(run, ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What every measurement with the daemon needs."""

    plan: LookupPlan
    say: Callable[[str], None]
    service: Service
    caller: Caller


def _measure_daemon(run: _Run, ratio: float) -> LookupResult:
    plan = run.plan
    run.say(f"storing {plan.rows:,} blocks")
    empty_bytes = run.service.daemon_resident_bytes()
    cached = chains(run.caller.namespace.key, plan.rows, _CHAIN, seed=1)
    fill(run.caller.session, run.caller.namespace, cached)
    prompts = [chain for chain in cached if len(chain) == _CHAIN]
    run.say("match and acquire, chained and random")
    chained, random = _pair(run, prompts), _pair(run, _shuffled(prompts))
    private_bytes = run.service.daemon_resident_bytes() - empty_bytes
    control = _control_plane(run)
    run.say(f"one client, and {plan.clients}")
    load = LoadPlan(
        socket=str(run.service.socket),
        seconds=plan.seconds,
        blocks=_CHAIN,
        prefix=_LENGTHS[0],
        chains=4,
        hbm_bytes=_hbm_bytes(plan),
    )
    calls, matches = (
        Rates(one=_throughput(role, load, 1), many=_throughput(role, load, plan.clients))
        for role in ("calls", "matches")
    )
    run.say("acquire while disk reads and eviction run")
    disk = replace(load, chains=plan.disk_chains)
    loaded, storing = (
        measure_loaded(run.service, run.caller, disk, prompts, roles=roles, samples=plan.loaded_samples)
        for roles in (("promote",), ("promote", "store"))
    )
    shape = run.caller.session.tables.tables.columns.shape
    return LookupResult(
        chained=chained,
        random=random,
        loaded=loaded,
        storing=storing,
        clients=plan.clients,
        calls_per_s=calls,
        matches_per_s=matches,
        control_plane=control,
        scale_ratio_10k_to_10m=ratio,
        index_bytes_per_block=table_bytes(shape) / shape.max_rows,
        daemon_private_bytes_per_block=private_bytes / plan.rows,
    )


def _control_plane(run: _Run) -> ControlPlane | None:
    if importlib.util.find_spec("torch") is None:
        return None
    run.say(f"the control plane's share of {run.plan.control_tokens:,} tokens")
    return measure_control_plane(run.service.socket, run.plan.control_tokens, run.plan.samples // 2 + 1)


def _hbm_bytes(plan: LookupPlan) -> int:
    # More than the fiftieth that the background keeps free: what is stored first must still be there at the end.
    wanted = (plan.rows + max(_SPARE_SLOTS, plan.rows // 40)) * SMALL.slot_bytes
    return -(-wanted // _EXTENT_BYTES) * _EXTENT_BYTES


def _shuffled(prompts: Sequence[U64]) -> list[U64]:
    """As many prompts of blocks that are cached, in no order: none follows its neighbour in the tables."""
    every = np.concatenate(prompts)
    mixed = every[np.random.default_rng(2).permutation(len(every))]
    return [mixed[at : at + _CHAIN] for at in range(0, len(mixed), _CHAIN)]


def _pair(run: _Run, prompts: Sequence[U64]) -> Pair:
    """Each sample another prompt; all have been looked up once, so that the tables are mapped here."""
    for prompt in prompts:
        run.caller.session.match(run.caller.namespace, prompt)
    source, samples = itertools.cycle(prompts), run.plan.samples
    match_ms, call_ms = {}, {}
    gc.disable()
    try:
        for length in _LENGTHS:
            match_ms[str(length)] = median(run.caller.match_ms(source, length, samples))
            call_ms[str(length)] = median(run.caller.call_ms(source, itertools.repeat(length), samples))
    finally:
        gc.enable()
    return Pair(match_ms=match_ms, call_ms=call_ms)


def _throughput(role: str, load: LoadPlan, clients: int) -> float:
    """Calls a second of all clients together."""
    with spawn(role, load, clients) as workers:
        for worker in workers:
            worker.go()
        time.sleep(load.seconds)
        done = [worker.result(ANSWER_S) for worker in workers]
    return sum(each["count"] / each["seconds"] for each in done)
