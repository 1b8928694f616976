"""Acquire while other clients keep the disk, the movers and the eviction busy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.blocks import ANSWER_S, LARGE
from bench.calls import Caller
from bench.load import LoadPlan, spawn
from bench.service import Service
from bench.timing import percentile
from kvstore.errors import KvstoreError

__all__ = ["HBM_BYTES", "Loaded", "measure_loaded"]

U64 = NDArray[np.uint64]

HBM_BYTES = 192 * LARGE.slot_bytes
"""Of the client that reads back from disk."""
_EVICTIONS = ("evictions_hbm", "evictions_dram", "evictions_nvme")
_LENGTHS = (1024, 4096)
_HOT_PROMPTS = 8
_STORE_CHAIN = 256
_DISK_CHAIN = 64
_WARM_UP_S = 1.0
_ENDLESS_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What an acquire costs, and what the daemon does meanwhile."""

    call_p50_ms: float
    call_p99_ms: float
    blocks_read_per_s: float
    """From disk, 1,474,560 bytes each."""
    evictions_per_s: float
    """In all tiers."""


def measure_loaded(
    service: Service,
    caller: Caller,
    load: LoadPlan,
    prompts: Sequence[U64],
    *,
    roles: Sequence[str],
    samples: int,
) -> Loaded:
    """Half of the calls ask for 1,024 blocks, half for 4,096; `roles` are the clients that run meanwhile.

    The prompts asked for stay in use; what the others store takes the place of older ones. Raises: KvstoreError when
    a client ends before the measurement does.
    """
    endless = replace(load, seconds=_ENDLESS_S)
    plans = {
        "promote": replace(endless, blocks=_DISK_CHAIN, hbm_bytes=HBM_BYTES, seed=load.seed + len(roles)),
        "store": replace(endless, blocks=_STORE_CHAIN),
    }
    hot = itertools.cycle(prompts[-_HOT_PROMPTS:])
    with ExitStack() as stack:
        clients = [stack.enter_context(spawn(role, plans[role]))[0] for role in roles]
        caller.call_ms(hot, itertools.repeat(max(_LENGTHS)), _HOT_PROMPTS)
        for client in clients:
            client.go()
        warm = time.monotonic() + _WARM_UP_S
        while time.monotonic() < warm:
            caller.call_ms(hot, itertools.repeat(max(_LENGTHS)), 1)
        before, start = service.counters(), time.monotonic()
        times = caller.call_ms(hot, itertools.cycle(_LENGTHS), samples)
        seconds = time.monotonic() - start
        after = service.counters()
        if not all(client.running() for client in clients):
            raise KvstoreError("a load client ended before the measurement did")
        for client in clients:
            client.result(ANSWER_S)
    return Loaded(
        call_p50_ms=percentile(times, 50),
        call_p99_ms=percentile(times, 99),
        blocks_read_per_s=(after["promotions"] - before["promotions"]) / seconds,
        evictions_per_s=sum(after[name] - before[name] for name in _EVICTIONS) / seconds,
    )
