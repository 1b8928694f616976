"""SGLang's hierarchical cache over the store: a `HiCacheStorage` for `--hicache-storage-backend dynamic`.

SGLang keeps its HBM and a pool of host memory to itself and asks from threads of its own; pages are copied between that
pool and DRAM slots in this process, so no byte of KV travels. Each rank is a session. No daemon is a miss, and SGLang
goes on; what it cannot be sure of is a miss as well. docs/sglang.md says how to switch it on.

Both ways of SGLang's interface work: whole tensors (`get`, `set`, …), and with `"interface_v1": 1` the pool's own
memory (`batch_get_v1`, …). A page stored in one way is not found in the other: its bytes may be in another order.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from engine_adapter.external.link import LinkPlan, StoreLink
from engine_adapter.external.options import cache_use
from engine_adapter.external.page_store import Copy, PageStore, Patience, Run
from engine_adapter.sglang_connector.facts import facts_of
from engine_adapter.sglang_connector.identity import HiCacheFacts, HiCacheOptions, namespace_parts, options_of
from kvstore.client import connect
from kvstore.errors import Unimplemented
from kvstore.geometry import opaque_geometry

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

__all__ = ["KvstoreHiCache"]

_LOG = logging.getLogger("kvstore.sglang")
_ROOM_BYTES = 256 << 20
_CLOSE_S = 5.0
_TIMEOUT_S = 5.0

Pieces = list[tuple[int, int]]
"""Of one page in host memory: (address, bytes), in order."""


class _Way(StrEnum):
    """How pages are handed over. It is part of their ids."""

    POOL = "pool"
    FLAT = "flat"


class KvstoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """See the module. SGLang makes one a rank; its prefetch and backup threads call at the same time."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """As SGLang's factory calls it. Raises ConfigError for a setting that is wrong. Asks the daemon nothing."""
        del kwargs
        self._config = storage_config
        extra = storage_config.extra_config or {}
        self._options = options_of(extra)
        self._way = _Way.POOL if extra.get("interface_v1", 0) else _Way.FLAT
        self._link: StoreLink | None = None
        self._store: PageStore | None = None
        self._page_bytes = 0
        self._other_pools: list[str] = []

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """The pool that pages are in: from now on there is a store, as soon as its daemon answers.

        Raises InvalidArgument where the model's weights have no name, Unimplemented for a pool without such pages.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._page_bytes = _page_bytes(mem_pool_host, self._way)
        facts = facts_of(self._config, mem_pool_host, self._page_bytes)
        if self._options.weights is None and facts.folder is None:
            namespace_parts(facts, None)  # says what to do
        self.close()
        self._link = StoreLink(_link_plan(facts, self._options))
        patience = Patience(load_s=self._options.load_s, store_s=self._options.store_s)
        self._store = PageStore(self._link, payload_bytes=self._page_bytes, patience=patience)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Pools beside the first one (Mamba states, sliding windows, indexers) are not kept: see `on_host_pools…`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._other_pools.append(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Raises Unimplemented for a model with several kinds of state: KV alone would never be a hit."""
        if self._other_pools:
            self.close()
            raise Unimplemented(
                f"models whose cache has other parts than KV are not supported: {', '.join(self._other_pools)}"
            )

    def close(self) -> None:
        """Gives the session up. SGLang has stopped its threads."""
        link, self._link, self._store = self._link, None, None
        if link is not None:
            link.close(_CLOSE_S)

    def clear(self) -> None:
        """Forgets all pages of this rank for good; what comes later is kept until this process ends.

        Weights may have been replaced. Raises Unavailable without a daemon; pages from before are not read even then.
        """
        if self._store is not None:
            with connect(self._options.socket, timeout_s=_TIMEOUT_S) as client:
                _LOG.info("%d pages are forgotten", self._store.clear(client))

    # ------------------------------------------------------------ which pages there are

    def exists(self, key: str) -> bool:
        """See HiCacheStorage."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Leading pages that are there. What only a disk has begins to come."""
        if self._store is None:
            return 0
        return self._store.cached(self._run(keys, extra_info, self._way))

    # ------------------------------------------------------------ pages in the pool's memory

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See HiCacheStorage. What is in a page that is not True is undefined."""
        pages = self._pool_pages(keys, host_indices)
        if self._store is None or pages is None:
            return [False] * len(keys)

        def copy(place: int, slot: int) -> None:
            for address, nbytes in pages[place]:
                ctypes.memmove(address, slot, nbytes)
                slot += nbytes

        return _bools(self._store.load(self._run(keys, extra_info, _Way.POOL), copy))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See HiCacheStorage. True: the store has it."""
        pages = self._pool_pages(keys, host_indices)
        if self._store is None or pages is None:
            return [False] * len(keys)
        return _bools(self._store.store(self._run(keys, extra_info, _Way.POOL), _copy_out(pages)))

    def _pool_pages(self, keys: list[str], host_indices: torch.Tensor) -> list[Pieces] | None:
        """Where each page is; None where this is not what the store has under these keys."""
        pool = self.mem_pool_host
        if len(host_indices) != len(keys) * pool.page_size:
            _LOG.error("%d pages do not have %d tokens", len(keys), len(host_indices))
            return None
        addresses, sizes = pool.get_page_buffer_meta(host_indices)
        count = len(addresses) // max(1, len(keys))
        pieces = list(zip(addresses, sizes, strict=True))
        pages = [pieces[begin : begin + count] for begin in range(0, len(pieces), max(1, count))]
        if any(sum(nbytes for _, nbytes in page) != self._page_bytes for page in pages):
            return None  # the store was opened for pages of the other way
        return pages

    # ------------------------------------------------------------ pages as tensors

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """See HiCacheStorage: `target_location`, filled, or None."""
        return self.batch_get([key], None if target_location is None else [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """See HiCacheStorage: each target, filled, or None. Without targets: new tensors of the pool's type."""
        del target_sizes  # the targets have theirs
        if self._store is None:
            return [None] * len(keys)
        targets = [self._new_page() for _ in keys] if target_locations is None else list(target_locations)
        pages = self._tensor_pages(targets)
        if pages is None or len(targets) != len(keys):
            return [None] * len(keys)

        def copy(place: int, slot: int) -> None:
            ((address, nbytes),) = pages[place]
            ctypes.memmove(address, slot, nbytes)

        loaded = self._store.load(self._run(keys, None, _Way.FLAT), copy).tolist()
        return [target if there else None for target, there in zip(targets, loaded, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """See HiCacheStorage."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """See HiCacheStorage: True where the store has all of them."""
        del target_locations, target_sizes
        values = [] if values is None else [_contiguous(value) for value in values]
        pages = self._tensor_pages(values)
        if self._store is None or pages is None or len(values) != len(keys):
            return False
        return bool(self._store.store(self._run(keys, None, _Way.FLAT), _copy_out(pages)).all())

    def _tensor_pages(self, tensors: Sequence[Any]) -> list[Pieces] | None:
        """Where each tensor is; None unless all of them are whole pages in host memory."""
        for tensor in tensors:
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.device.type != "cpu"
                or not tensor.is_contiguous()
                or tensor.numel() * tensor.element_size() != self._page_bytes
            ):
                return None
        return [[(tensor.data_ptr(), self._page_bytes)] for tensor in tensors]

    def _new_page(self) -> torch.Tensor:
        dtype = self.mem_pool_host.dtype
        return torch.empty(self._page_bytes // dtype.itemsize, dtype=dtype)

    # ------------------------------------------------------------ several pools: not kept

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """See HiCacheStorage. Nothing, where anything but KV is asked for."""
        if pool_transfers:
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See HiCacheStorage. Nothing."""
        del extra_info
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See HiCacheStorage. Nothing."""
        return self.batch_get_v2(transfers, extra_info)

    def _run(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None, way: _Way) -> Run:
        """The pages by their ids. The way they are stored in is part of the id."""
        before = (extra_info.prefix_keys or []) if extra_info is not None else []
        return Run(
            ids=[f"{way} {key}".encode() for key in keys], before=[f"{way} {key}".encode() for key in before]
        )


def _bools(marks: NDArray[np.bool_]) -> list[bool]:
    return [bool(mark) for mark in marks]


def _copy_out(pages: list[Pieces]) -> Copy:
    def copy(place: int, slot: int) -> None:
        for address, nbytes in pages[place]:
            ctypes.memmove(slot, address, nbytes)
            slot += nbytes

    return copy


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _page_bytes(pool: HostKVCache, way: _Way) -> int:
    """Bytes of one page, as SGLang will hand it over. Raises Unimplemented for a pool that has no such pages."""
    try:
        if way is _Way.FLAT:
            page = pool.get_dummy_flat_data_page()
            return int(page.numel() * page.element_size())
        return int(sum(pool.get_page_buffer_meta(torch.arange(pool.page_size))[1]))
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise Unimplemented(
            f"pages of {type(pool).__name__} in layout {pool.layout!r} cannot be copied: {error}"
        ) from error


def _link_plan(facts: HiCacheFacts, options: HiCacheOptions) -> LinkPlan:
    geometry = opaque_geometry(facts.page_bytes)
    return LinkPlan(
        socket=options.socket,
        name=f"sglang {facts.model} tp{facts.tp_rank} pp{facts.pp_rank}",
        timeout_s=_TIMEOUT_S,
        geometry=geometry,
        group=None,
        room_blocks=max(16, min(256, _ROOM_BYTES // geometry.slot_bytes)),
        parts=lambda identity: namespace_parts(facts, options.weights, epoch=identity.epoch),
        use=cache_use(options.cache),
        tenant=options.tenant or "",
    )
