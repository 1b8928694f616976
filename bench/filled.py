"""A block manager whose pages hold random numbers and whose prompts are cached already: decode without any prefill.

Keys and values are drawn once; what a step reads, writes and computes is what it would be with real ones. Where the
pages of all requests do not fit, requests share them, each from another place of the pool on, so that no two read the
same page at the same time: a step then reads as many bytes as it would without sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import EVERYTHING, Admission, Ending, Pages, Reach, RequestId

if TYPE_CHECKING:
    import torch

__all__ = ["FilledBlocks", "filled_pool"]


def filled_pool(pages: int, page_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[pages, page_bytes]` bytes on `device` that read as normal numbers of `dtype`."""
    import torch

    pool = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)
    pool.view(dtype).normal_()
    return pool


@dataclass(slots=True)
class _Table:
    pages: NDArray[np.int32]
    cached_blocks: int


class FilledBlocks:
    """Implements `engine_adapter.base.BlockManager` over a pool. One thread.

    The first `cached_pages` pages hold what is cached, of whatever prompt, and belong to nobody; the others are given
    to requests to fill. With 0 cached pages nothing is a hit.
    """

    def __init__(self, pool: torch.Tensor, block_tokens: int, *, cached_pages: int, seed: int = 0) -> None:
        """`pool` is `[pages, page_bytes]` bytes. Tables name its pages in random order, as those of an old pool are."""
        self.block_tokens = block_tokens
        count, page_bytes = pool.shape
        self._view = Pages(
            address=pool.data_ptr(), count=count, page_bytes=page_bytes, device=str(pool.device), owner=pool
        )
        self._cached = np.random.default_rng(seed).permutation(cached_pages).astype(np.int32)
        self._free = list(range(cached_pages, count))
        self._tables: dict[RequestId, _Table] = {}
        self._next = 0
        self.computed_beside: Callable[[int], None] = lambda _: None
        """Hears of the engine's steps: a copier that runs beside them."""

    def kv_pages(self) -> Pages:
        """See BlockManager."""
        return self._view

    def enqueue(
        self, request: RequestId, token_ids: Sequence[int] | NDArray[np.uint32], *, ahead: int = 0
    ) -> None:
        """See BlockManager."""

    def prepare(self, request: RequestId) -> None:
        """See BlockManager."""

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        """See BlockManager. Everything but the last block, or the last token's, is cached."""
        cached = (num_tokens - 1) // self.block_tokens if len(self._cached) else 0
        order = (self._next + np.arange(cached)) % max(1, len(self._cached))
        self._tables[request] = _Table(pages=self._cached[order], cached_blocks=cached)
        if not self.reserve(request, num_tokens):
            del self._tables[request]
            return None
        self._advance(cached)
        tokens = cached * self.block_tokens
        return Admission(cached_tokens=tokens, cached_by_tier={"hbm": tokens} if tokens else {})

    def _advance(self, cached: int) -> None:
        """The next request's place; a third of a request further on in each round, out of step with the last one."""
        self._next += cached
        if self._next >= len(self._cached) > 0:
            self._next = (self._next + cached // 3) % len(self._cached)

    def pages(self, request: RequestId) -> NDArray[np.int32]:
        """See BlockManager."""
        return self._tables[request].pages

    def reserve(self, request: RequestId, num_tokens: int) -> bool:
        """See BlockManager."""
        table = self._tables[request]
        missing = -(-num_tokens // self.block_tokens) - len(table.pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            given = [self._free.pop() for _ in range(missing)]
            table.pages = np.concatenate([table.pages, np.array(given, dtype=np.int32)])
        return True

    def reach(self, request: RequestId, num_tokens: int) -> Reach:
        """See BlockManager. Nothing is loaded."""
        assert request in self._tables
        return Reach(computed_tokens=num_tokens, stop_tokens=EVERYTHING)

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """See BlockManager. Nothing is decided."""

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        """See BlockManager."""

    def ended(self, request: RequestId, ending: Ending) -> None:
        """See BlockManager. Nothing is kept."""

    def release(self, request: RequestId) -> None:
        """See BlockManager."""
        table = self._tables.pop(request, None)
        if table is not None:
            self._free += table.pages[table.cached_blocks :].tolist()

    def report_wrong(self, request: RequestId, block: int, detail: str) -> None:
        """See BlockManager."""

    def take_wrong(self) -> list[RequestId]:
        """See BlockManager. Nothing is cached here."""
        return []

    def computing(self, steps: int) -> None:
        """See BlockManager."""
        self.computed_beside(steps)

    def end_step(self) -> None:
        """See BlockManager."""

    def wait(self, timeout_s: float) -> None:
        """See BlockManager."""
