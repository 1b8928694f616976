"""SGLang's cache controller with its own threads: attached, used and detached as a server does it."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang import standins
from tests.support.daemon import Service, wait_for

if not standins.is_installed():
    pytest.skip("needs SGLang: make test-sglang", allow_module_level=True)

import sglang.srt.managers.cache_controller as controllers
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.sglang.rank import LAYERS, PAGE, mha_pool

pytestmark = pytest.mark.engine

ALONE = SimpleNamespace(
    attn_dcp_rank=0,
    attn_dcp_size=1,
    pp_rank=0,
    pp_size=1,
    tp_rank=0,
    tp_size=1,
    attn_tp_rank=0,
    attn_tp_size=1,
)


@contextmanager
def attached(
    service: Service, monkeypatch: pytest.MonkeyPatch, layout: str, **settings: object
) -> Iterator[Any]:
    """A controller of one rank, its storage attached by its own `attach_storage_backend`."""
    monkeypatch.setattr(controllers, "get_parallel", lambda: ALONE)
    monkeypatch.setattr(controllers, "is_dp_attention_enabled", lambda: False)
    device_pool = SimpleNamespace(
        device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda _: None
    )
    allocator = SimpleNamespace(get_kvcache=lambda: device_pool)
    made = controllers.HiCacheController(allocator, mha_pool(layout), PAGE, None, None, io_backend="direct")
    extra = {
        "backend_name": "kvstore",
        "module_path": "engine_adapter.sglang",
        "class_name": "KvstoreHiCache",
        "kvstore": {"socket": service.socket, "weights": "threads@1"},
        **settings,
    }
    made.attach_storage_backend("dynamic", PAGE, "tiny", extra)
    try:
        wait_for("the store", lambda: made.storage_backend._store.ready)
        yield made
    finally:
        made.detach_storage_backend()


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def store(controller: Any, tokens: list[int], seed: int) -> list[torch.Tensor]:
    """Writes pages by the backup thread; what is in them."""
    pool = controller.mem_pool_host
    indices = pool.alloc(len(tokens))
    generator = torch.Generator().manual_seed(seed)
    for at in range(0, len(tokens), PAGE):
        page = torch.rand(pool.get_dummy_flat_data_page().shape, generator=generator)
        pool.set_from_flat_data_page(int(indices[at]), page)
    hashes = get_storage_hash_str(key(tokens), None, page_size=PAGE)
    controller.write_storage(indices, tokens, hash_value=hashes)
    done = controller.ack_backup_queue.get(timeout=20)
    assert done.completed_tokens == len(tokens)
    pages = pages_of(pool, indices)
    pool.free(indices)
    return pages


def load(controller: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Reads pages by the prefetch threads, with the scheduler's part between query and transfer."""
    pool = controller.mem_pool_host
    controller.prefetch("request", key(tokens), None, None)
    operation = controller.prefetch_hit_queue.get(timeout=20)
    operation.host_indices = pool.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    completed = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=20)).completed_req:
        completed = ack.completed_tokens
    pages = pages_of(pool, operation.host_indices[:completed])
    pool.free(operation.host_indices)
    return pages


def pages_of(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    return [pool.get_data_page(int(indices[at])).clone() for at in range(0, len(indices), PAGE)]


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_a_controllers_threads_store_and_load(
    service: Service, monkeypatch: pytest.MonkeyPatch, interface_v1: int
) -> None:
    draw = random.Random(interface_v1)
    stored: dict[int, list[torch.Tensor]] = {}
    with attached(service, monkeypatch, "page_first", interface_v1=interface_v1) as controller:
        for first in range(1, 9):
            tokens = [1000 * interface_v1 + first, *range(2, 1 + PAGE * draw.randrange(1, 30))]
            tokens = tokens[: len(tokens) // PAGE * PAGE]
            stored[first] = store(controller, tokens, seed=first) if tokens else []
            got = load(controller, [*tokens, *range(9000, 9000 + 2 * PAGE)])
            assert len(got) == len(stored[first])
            assert all(torch.equal(*pair) for pair in zip(got, stored[first], strict=True))
        assert load(controller, [77_000 + interface_v1, *range(1, 4 * PAGE)]) == []
    assert service.faults() == []


def test_a_detached_backend_gives_its_session_up_and_another_one_hits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [55_555, *range(1, 12 * PAGE)]
    with attached(service, monkeypatch, "layer_first", interface_v1=1) as controller:
        pages = store(controller, tokens, seed=3)
    wait_for("no session", lambda: not service.stats().sessions)
    with attached(service, monkeypatch, "layer_first", interface_v1=1) as controller:
        got = load(controller, tokens)
        assert len(got) == 12
        assert all(torch.equal(*pair) for pair in zip(got, pages, strict=True))


def test_loads_and_stores_run_beside_each_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup thread's answers must not be taken by a thread that loads."""
    with attached(service, monkeypatch, "page_first_direct", interface_v1=1) as controller:
        old = [66_000, *range(1, 20 * PAGE)]
        pages = store(controller, old, seed=1)
        pool = controller.mem_pool_host
        until_s = time.monotonic() + 1.5
        rounds = 0
        while time.monotonic() < until_s:
            new = [67_000 + rounds, *range(1, 10 * PAGE)]
            indices = pool.alloc(len(new))
            hashes = get_storage_hash_str(key(new), None, page_size=PAGE)
            controller.write_storage(indices, new, hash_value=hashes)
            got = load(controller, old)
            assert len(got) == 20
            assert all(torch.equal(*pair) for pair in zip(got, pages, strict=True))
            assert controller.ack_backup_queue.get(timeout=20).completed_tokens == len(new)
            pool.free(indices)
            rounds += 1
        assert rounds > 3
