"""A block manager without a cache, in this process's memory: the twin for tests, and what `--no-cache` runs on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import EVERYTHING, Admission, Ending, Pages, Reach, RequestId

__all__ = ["PlainBlockManager"]


@dataclass(slots=True)
class _Table:
    pages: NDArray[np.int32]
    used: int


class PlainBlockManager:
    """Pages from a free stack; nothing is ever cached. Implements `engine_adapter.base.BlockManager`."""

    def __init__(self, *, num_pages: int, page_bytes: int, block_tokens: int, device: str = "cpu") -> None:
        """`device` is `cpu` or, for pages of torch's allocator on a GPU, `cuda:N`."""
        self.block_tokens = block_tokens
        make = _host_pages if device == "cpu" else _device_pages
        self._pages: Pages = make(num_pages, page_bytes, device)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._tables: dict[RequestId, _Table] = {}

    def kv_pages(self) -> Pages:
        return self._pages

    def enqueue(
        self, request: RequestId, token_ids: Sequence[int] | NDArray[np.uint32], *, ahead: int = 0
    ) -> None:
        pass  # nothing to prefetch

    def prepare(self, request: RequestId) -> None:
        pass  # nothing to load

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        if request in self._tables:
            raise ValueError(f"request {request} is admitted already")
        self._tables[request] = _Table(np.empty(0, np.int32), 0)
        if not self.reserve(request, num_tokens):
            del self._tables[request]
            return None
        return Admission(cached_tokens=0, cached_by_tier={})

    def pages(self, request: RequestId) -> NDArray[np.int32]:
        table = self._tables[request]
        return table.pages[: table.used]

    def reserve(self, request: RequestId, num_tokens: int) -> bool:
        table = self._tables[request]
        more = -(-num_tokens // self.block_tokens) - table.used
        if more <= 0:
            return True
        if more > self._num_free:
            return False
        if table.used + more > len(table.pages):  # doubled, so that growing by one page is O(1) on average
            grown = np.empty(max(table.used + more, 2 * len(table.pages)), np.int32)
            grown[: table.used] = table.pages[: table.used]
            table.pages = grown
        self._num_free -= more
        table.pages[table.used : table.used + more] = self._free[self._num_free : self._num_free + more][::-1]
        table.used += more
        return True

    def reach(self, request: RequestId, num_tokens: int) -> Reach:
        """See BlockManager. Nothing is loaded."""
        assert request in self._tables
        return Reach(computed_tokens=num_tokens, stop_tokens=EVERYTHING)

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """See BlockManager. Nothing is decided."""

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        pass  # nothing is shared

    def ended(self, request: RequestId, ending: Ending) -> None:
        """See BlockManager. Nothing is kept."""

    def release(self, request: RequestId) -> None:
        table = self._tables.pop(request, None)
        if table is not None:
            self._free[self._num_free : self._num_free + table.used] = table.pages[: table.used]
            self._num_free += table.used

    def report_wrong(self, request: RequestId, block: int, detail: str) -> None:
        """See BlockManager. Nothing is cached here."""

    def take_wrong(self) -> list[RequestId]:
        """See BlockManager. Nothing is cached here."""
        return []

    def computing(self, steps: int) -> None:
        """See BlockManager. Nothing is copied."""

    def end_step(self) -> None:
        pass  # nobody to tell

    def wait(self, timeout_s: float) -> None:
        pass  # an answer changes only by the engine's own releases

    def check_integrity(self) -> None:
        """Every page is free or in exactly one table; AssertionError otherwise. O(num_pages)."""
        held = [table.pages[: table.used] for table in self._tables.values()]
        everything = np.concatenate([self._free[: self._num_free], *held])
        assert np.array_equal(np.sort(everything), np.arange(self._pages.count))


def _host_pages(num_pages: int, page_bytes: int, device: str) -> Pages:
    memory = np.zeros((num_pages, page_bytes), np.uint8)
    return Pages(
        address=memory.ctypes.data, count=num_pages, page_bytes=page_bytes, device=device, owner=memory
    )


def _device_pages(num_pages: int, page_bytes: int, device: str) -> Pages:
    import torch

    memory = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
    return Pages(
        address=memory.data_ptr(), count=num_pages, page_bytes=page_bytes, device=device, owner=memory
    )
