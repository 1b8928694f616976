"""What a test has done inside the process of a vLLM (`tests.vllm.driver`): looks at it, and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_adapter.external.link import Identity
from kvstore.cache_use import Access

if TYPE_CHECKING:
    from tests.vllm.driver import Driver


_PATIENCE_S = 120.0
_SETTLED_STEPS = 5
"""After a block was stored, and its seal answered: the slot's release has been said by then."""
_MOST_STEPS = 900


def scheduling(driver: Driver) -> Any:
    """The connector's scheduling half."""
    return driver.core.scheduler.connector._half.scheduling


def attached(driver: Driver, timeout_s: float = 60.0) -> bool:
    """Whether within a time the store is reached, and prompts can be looked up and stored: what is asked before that is
    computed, and may find no slot to be stored in."""
    until = time.monotonic() + timeout_s
    link = driver.core.scheduler.connector._half._link
    while time.monotonic() < until:
        session = link.session
        if (
            session is not None
            and link.namespace(Identity()) is not None
            and (session.room_in_hand or not session.use.access & Access.WRITES)
        ):
            return True
        time.sleep(0.02)
    return False


def stats(driver: Driver) -> dict[str, int]:
    """Counters of the scheduling half."""
    found = scheduling(driver).stats()
    return {name: getattr(found, name) for name in found.__slots__}


def slots_in_hand(driver: Driver) -> int:
    """DRAM slots that wait to be filled."""
    return int(driver.core.scheduler.connector._half._link.attached.room_in_hand)


def _held_loads(driver: Driver) -> Callable[[], None]:
    """From now on no load is copied; what is returned lets them go."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from engine_adapter.copying.copier import Direction

    copier, go = get_kv_transfer_group()._rank._working._mover._copier, threading.Event()
    plain = copier._copies

    def copy(*arguments: int) -> None:
        go.wait(_PATIENCE_S)
        plain[Direction.LOAD](*arguments)

    copier._copies = tuple(copy if at == Direction.LOAD else one for at, one in enumerate(plain))

    def let_go() -> None:
        copier._copies = plain
        go.set()

    return let_go


def fail_loads(driver: Driver, blocks: int) -> None:
    """The next `blocks` blocks that are loaded turn out not to be what they were."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    memory = get_kv_transfer_group()._rank._working._memory
    plain, left = type(memory).sealed, [blocks]

    def sealed(slots: Any, generations_: Any) -> Any:
        good = plain(memory, slots, generations_).copy()
        bad = min(left[0], len(good))
        good[len(good) - bad :] = False  # the last ones: what is before them is kept
        left[0] -= bad
        return good

    memory.sealed = sealed


def vanish(driver: Driver, socket: str) -> None:
    """Between the next lookup and its load all blocks go: as if others had evicted them."""
    from kvstore.client import connect
    from kvstore.wire.v1 import kvstore_pb2 as pb

    half = scheduling(driver)
    plain = half.allocated

    def allocated(name: str, block_ids: Any, external_tokens: int) -> None:
        if external_tokens:
            half.allocated = plain
            with connect(socket) as client:
                client.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
        plain(name, block_ids, external_tokens)

    half.allocated = allocated


def abort_during_load(driver: Driver, tokens: list[int]) -> dict[str, Any]:
    """Asks for a prompt, aborts it while it is being loaded, and says what is left of it."""
    from vllm import SamplingParams

    engine, let_go = driver.llm.llm_engine, _held_loads(driver)
    free = driver.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.add_request("aborted", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=4))
    until, loading = time.monotonic() + _PATIENCE_S, False
    while time.monotonic() < until and not loading:
        engine.step()
        half = scheduling(driver)
        loading = any(
            request.load is not None and name not in half._loading._waiting
            for name, request in half._requests.items()
        )
    engine.abort_request(["aborted"], internal=False)
    held = driver.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < free
    let_go()
    driver.drain()
    return {
        "loading": loading,
        "held": held,
        "freed": driver.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free,
        "requests": len(scheduling(driver)._requests),
        "copying": len(scheduling(driver)._copying),
    }


class _Preempting:
    """Preemptions since it was set up, and copies that wait for one."""

    def __init__(self, driver: Driver) -> None:
        self.all = self.during_stores = self.during_loads = 0
        self._scheduler = driver.core.scheduler
        self._half = scheduling(driver) if self._scheduler.connector else None
        self._plain = self._scheduler._preempt_request
        self._scheduler._preempt_request = self._preempt

    def _preempt(self, request: Any, *rest: Any, **more: Any) -> None:
        self.all += 1
        if self._half is not None:
            entry = self._half._requests.get(request.request_id)
            self.during_stores += bool(entry is not None and entry.stores)
            self.during_loads += any(one.load is not None for one in self._half._requests.values())
        self._plain(request, *rest, **more)

    def await_one(self, direction: str, seconds: float) -> None:
        """Returns when a request was preempted during a copy of that direction, nothing runs, or the time is over."""
        before, until = getattr(self, f"during_{direction}"), time.monotonic() + seconds
        while (
            getattr(self, f"during_{direction}") == before
            and self._scheduler.running
            and time.monotonic() < until
        ):
            time.sleep(0.002)


def hold_copies(driver: Driver, direction: str, seconds: float, running: int) -> None:
    """The next copy of one direction ("LOAD" or "STORE") that begins while so many run waits for a preemption."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from engine_adapter.copying.copier import Direction

    copier, way = get_kv_transfer_group()._rank._working._mover._copier, Direction[direction]
    plain = copier._copies

    def copy(*arguments: int) -> None:
        if len(driver.core.scheduler.running) >= running:
            copier._copies = plain
            driver.preempting.await_one(f"{direction.lower()}s", seconds)
        plain[way](*arguments)

    copier._copies = tuple(copy if at == way else one for at, one in enumerate(plain))


def delay_last(driver: Driver, number: int) -> None:
    """Of the next so many requests the last one is looked up once all others run, so that its load begins then.

    All would be loaded before any of them runs, else, and none while something can be preempted.
    """
    scheduler, seen = driver.core.scheduler, dict[str, None]()
    connector, plain = scheduler.connector, scheduler.connector.get_num_new_matched_tokens

    def matched(request: Any, computed: int) -> Any:
        seen.setdefault(request.request_id)
        if len(seen) == number and request.request_id == [*seen][-1]:
            if len(scheduler.running) < number - 1:
                return None, False
            connector.get_num_new_matched_tokens = plain
        return plain(request, computed)

    connector.get_num_new_matched_tokens = matched


def preemptions(driver: Driver) -> dict[str, int]:
    """Since this was asked first: how many, and of these, those of requests that were being stored, and those while
    some request was being loaded."""
    if not hasattr(driver, "preempting"):
        driver.preempting = _Preempting(driver)
    found = driver.preempting
    return {"all": found.all, "during_stores": found.during_stores, "during_loads": found.during_loads}


def time_steps(driver: Driver, tokens: list[int], steps: int) -> dict[str, Any]:
    """What the connector adds to `steps` steps of a decoding request in which it has nothing to do, in microseconds.

    All that vLLM calls in such a step is timed; also says what was sent to the daemon in them.
    """
    import numpy as np
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spent = [0.0]

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                spent[0] += time.perf_counter() - began

        return run

    scheduler = driver.core.scheduler
    for connector, names in (
        (
            scheduler.connector,
            (
                "build_connector_meta",
                "update_connector_output",
                "take_events",
                "has_pending_push_work",
                "get_num_new_matched_tokens",
            ),
        ),
        (
            get_kv_transfer_group(),
            (
                "handle_preemptions",
                "bind_connector_metadata",
                "start_load_kv",
                "wait_for_save",
                "get_transfer_results",
                "get_block_ids_with_load_errors",
                "build_connector_worker_meta",
                "clear_connector_metadata",
            ),
        ),
    ):
        for name in names:
            setattr(connector, name, timed(getattr(connector, name)))
    session = scheduler.connector._half._link.attached
    engine = driver.llm.llm_engine
    engine.add_request(
        "timed", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=_MOST_STEPS, ignore_eos=True)
    )
    found, sent, rest = [], 0, 0
    while engine.has_unfinished_requests() and len(found) < steps:
        spent[0], before = 0.0, session.sent_messages
        engine.step()
        half = scheduling(driver)
        settled = session.quiet() and not (half._copying or half._storing.under_way)
        rest = rest + 1 if settled else 0
        if rest > _SETTLED_STEPS:
            found.append(spent[0] * 1e6)
            sent += session.sent_messages - before
    engine.abort_request(["timed"], internal=False)
    driver.drain()
    return {
        "steps": len(found),
        "p50_us": float(np.median(found)),
        "max_us": float(max(found)),
        "sent": sent,
    }


def layout_of(driver: Driver, backend: list[str]) -> str:
    """The layout that vLLM takes for the connector on a GPU whose attention backend can have these."""
    from copy import copy
    from types import SimpleNamespace

    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    import engine_adapter.vllm as connector

    config = copy(driver.llm.llm_engine.vllm_config)
    config.cache_config = copy(config.cache_config)
    config.cache_config.kv_cache_layout = None
    plain, connector.current_platform = connector.current_platform, SimpleNamespace(is_cpu=lambda: False)
    try:
        return str(resolve_kv_cache_layout(config, [backend]).name)
    finally:
        connector.current_platform = plain


def record_events(driver: Driver) -> None:
    """From now on the connector's events are kept."""
    connector = driver.core.scheduler.connector
    connector.kept, plain = [], connector.take_events

    def take() -> Any:
        events = list(plain())
        connector.kept += events
        return events

    connector.take_events = take


def recorded_events(driver: Driver) -> list[dict[str, Any]]:
    """Those that were kept, as far as they can be told."""
    return [
        {
            "blocks": len(event.block_hashes),
            "first": event.parent_block_hash is None,
            "tokens": len(event.token_ids),
            "medium": event.medium,
        }
        for event in driver.core.scheduler.connector.kept
    ]
