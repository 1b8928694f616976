"""One rank of SGLang as far as storage goes: its host pool, its controller's calls, our backend by its factory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any, Self

import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.support.daemon import wait_for

__all__ = ["HEADS", "LAYERS", "PAGE", "Rank", "mha_pool", "mla_pool"]

LAYERS, HEADS, HEAD_DIM, PAGE, TOKENS = 3, 2, 8, 4, 256
CPU = torch.device("cpu")


def mha_pool(layout: str, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> MHATokenToKVPoolHost:
    """A host pool of `2 * TOKENS` tokens for a small model."""
    k, v = ([torch.zeros(TOKENS, heads, HEAD_DIM, dtype=dtype) for _ in range(LAYERS)] for _ in "kv")
    buffers = KVBuffers(
        k=tuple(k),
        v=tuple(v),
        k_data_ptrs=torch.tensor([buffer.data_ptr() for buffer in k]),
        v_data_ptrs=torch.tensor([buffer.data_ptr() for buffer in v]),
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=heads,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=CPU,
    )
    pool = MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )
    pool.kv_buffer.zero_()
    return pool


def mla_pool(layout: str) -> MLATokenToKVPoolHost:
    """As `mha_pool`, of a model whose ranks have the same KV."""
    rows = tuple(torch.zeros(TOKENS, 1, 24) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([row.data_ptr() for row in rows]),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=torch.float32,
        device=CPU,
    )
    pool = MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    pool.kv_buffer.zero_()
    return pool


class Rank:
    """A controller without its threads: the test calls what they would, in their order."""

    def __init__(
        self,
        socket: str,
        pool: Any,
        *,
        interface_v1: int = 1,
        model: str = "tiny",
        weights: str | None = "tiny@1",
        tp: tuple[int, int] = (0, 1),
        is_mla: bool = False,
        pass_prefix: bool = True,
        **settings: object,
    ) -> None:
        ours = {"socket": socket, "load_s": 1.0, "store_s": 0.5, **settings}
        if weights is not None:
            ours["weights"] = weights
        self.config = HiCacheStorageConfig(
            tp_rank=tp[0],
            tp_size=tp[1],
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=is_mla,
            enable_storage_metrics=False,
            is_page_first_layout=pool.layout == "page_first",
            model_name=model,
            extra_config={
                "backend_name": "kvstore",
                "module_path": "engine_adapter.sglang",
                "class_name": "KvstoreHiCache",
                "interface_v1": interface_v1,
                "kvstore": ours,
            },
        )
        self.pool = pool
        self.pass_prefix = pass_prefix
        self.backend = StorageBackendFactory.create_backend("dynamic", self.config, pool)
        device_pool = SimpleNamespace(
            device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda _: None
        )
        allocator = SimpleNamespace(get_kvcache=lambda: device_pool)
        self.controller = HiCacheController(allocator, pool, PAGE, None, None, io_backend="direct")
        controller = self.controller
        controller.storage_backend = self.backend
        controller.prefetch_sync_queue = Queue()
        if interface_v1:
            controller.page_get_func = controller._page_get_zero_copy
            controller.page_set_func = controller._page_set_zero_copy
        try:
            self.backend.register_mem_pool_host(pool)
            self.backend.on_host_pools_registered()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """As `detach_storage_backend` does."""
        inner = getattr(self.backend, "_backend", self.backend)  # SGLang's failure injector has no close
        inner.close()

    def await_store(self) -> Rank:
        """Until there is a store."""
        inner = getattr(self.backend, "_backend", self.backend)
        wait_for("the store", lambda: inner._store is not None and inner._store.ready)
        return self

    def hashes(self, tokens: Sequence[int], **key: Any) -> list[str]:
        """SGLang's page hashes of whole pages."""
        whole = len(tokens) // PAGE * PAGE
        found = get_storage_hash_str(RadixKey(array("q", tokens[:whole]), **key), None, page_size=PAGE)
        assert isinstance(found, list)
        return found

    def fill(self, tokens: Sequence[int], seed: int) -> torch.Tensor:
        """Host indices of pages with random KV for these tokens."""
        indices = self.pool.alloc(len(tokens) // PAGE * PAGE)
        assert indices is not None
        generator = torch.Generator().manual_seed(seed)
        for at in range(0, len(indices), PAGE):
            page = torch.rand(self.pool.get_dummy_flat_data_page().shape, generator=generator)
            self.pool.set_from_flat_data_page(int(indices[at]), page.to(self.pool.dtype))
        return indices

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """A copy of each page."""
        return [self.pool.get_data_page(int(indices[at])).clone() for at in range(0, len(indices), PAGE)]

    def backup(self, tokens: Sequence[int], indices: torch.Tensor, **key: Any) -> int:
        """What the backup thread does: tokens that were stored."""
        operation = StorageOperation(
            indices,
            list(tokens),
            hash_value=self.hashes(tokens, **key),
            prefix_keys=[] if self.pass_prefix else None,
        )
        self.controller._page_backup(operation)
        return int(operation.completed_tokens)

    def prefetch(self, tokens: Sequence[int], **key: Any) -> tuple[int, torch.Tensor]:
        """What the prefetch threads do: pages that came, and the host indices they went to."""
        whole = len(tokens) // PAGE * PAGE
        operation = PrefetchOperation(
            "request",
            RadixKey(array("q", tokens[:whole]), **key),
            prefix_keys=[] if self.pass_prefix else None,
        )
        operation.hash_value, hit_tokens = self.controller._storage_hit_query(operation)
        indices = self.pool.alloc(hit_tokens) if hit_tokens else torch.empty(0, dtype=torch.int64)
        assert indices is not None
        operation.host_indices = indices
        return int(self.controller._page_transfer(operation)), indices
