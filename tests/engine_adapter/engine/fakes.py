"""A block manager with a prefix cache in process memory: hits, pending fills and eviction without a daemon."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import EVERYTHING, Admission, Ending, Pages, Reach, RequestId
from tests.support.pages import pages_of

Key = tuple[int, ...]


@dataclass(slots=True)
class Table:
    pages: list[int]
    keys: list[Key] = field(default_factory=list)  # of all full blocks of the admitted tokens
    shared: int = 0  # leading pages that were hits


class PrefixCacheBlocks:
    """Blocks are keyed by the whole prefix; `sealed` maps a key to its page, oldest first (the LRU order)."""

    def __init__(self, *, num_pages: int, page_bytes: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        # Recycled pages hold arbitrary bytes: all ones are NaN in every float type.
        self.memory = np.full((num_pages, page_bytes), 0xFF, np.uint8)
        self.free = list(range(num_pages))
        self.refs = np.zeros(num_pages, np.int64)
        self.sealed: dict[Key, int] = {}
        self.filling: dict[Key, RequestId] = {}
        self.tables: dict[RequestId, Table] = {}
        self.queued: dict[RequestId, list[int]] = {}
        self.computed_tokens = 0
        self.calls: list[str] = []
        self.under_way: list[int] = []
        self.wrong: list[tuple[int, str]] = []
        self.found_wrong: list[RequestId] = []
        self.ahead: dict[RequestId, int] = {}
        self.prepared: list[RequestId] = []
        self.endings: list[tuple[RequestId, Ending]] = []

    def kv_pages(self) -> Pages:
        return pages_of(self.memory)

    def enqueue(self, request: RequestId, token_ids: Sequence[int], *, ahead: int = 0) -> None:
        self.calls.append("enqueue")
        self.ahead[request] = ahead
        assert request not in self.tables
        self.queued[request] = list(token_ids)

    def prepare(self, request: RequestId) -> None:
        assert request in self.queued
        self.prepared.append(request)

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        self.calls.append("admit")
        tokens = self.queued[request]
        assert num_tokens >= len(tokens)
        keys = [
            tuple(tokens[: end * self.block_tokens]) for end in range(1, len(tokens) // self.block_tokens + 1)
        ]
        hits = 0
        for key in keys[: (len(tokens) - 1) // self.block_tokens]:
            if key in self.filling:
                return None
            if key not in self.sealed:
                break
            hits += 1
        table = Table([self.sealed[key] for key in keys[:hits]], keys, hits)
        self.refs[table.pages] += 1
        self.tables[request] = table
        if not self.reserve(request, num_tokens):
            self._drop(self.tables.pop(request))
            return None
        for key in keys[hits:]:
            if key not in self.sealed:
                self.filling.setdefault(key, request)
        del self.queued[request]
        self.computed_tokens += len(tokens) - hits * self.block_tokens
        cached = hits * self.block_tokens
        return Admission(cached_tokens=cached, cached_by_tier={"hbm": cached} if cached else {})

    def pages(self, request: RequestId) -> NDArray[np.int32]:
        return np.array(self.tables[request].pages, np.int32)

    def reserve(self, request: RequestId, num_tokens: int) -> bool:
        self.calls.append("reserve")
        table = self.tables[request]
        more = -(-num_tokens // self.block_tokens) - len(table.pages)
        evictable = [key for key, page in self.sealed.items() if self.refs[page] == 0]
        if more > len(self.free) + len(evictable):
            return False
        for key in evictable[: max(0, more - len(self.free))]:
            page = self.sealed.pop(key)
            self.memory[page] = 0xFF
            self.free.append(page)
        taken = [self.free.pop() for _ in range(max(0, more))]
        self.refs[taken] += 1
        table.pages += taken
        return True

    def reach(self, request: RequestId, num_tokens: int) -> Reach:
        return Reach(computed_tokens=num_tokens, stop_tokens=EVERYTHING)

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        assert spans
        assert seconds >= 0

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        self.calls.append("commit")
        table = self.tables[request]
        assert num_tokens <= len(token_ids)
        for block in range(table.shared, num_tokens // self.block_tokens):
            key = tuple(token_ids[: (block + 1) * self.block_tokens])
            if self.filling.get(key) == request:
                del self.filling[key]
            if key not in self.sealed and table.pages[block] not in self.sealed.values():
                self.sealed[key] = table.pages[block]

    def ended(self, request: RequestId, ending: Ending) -> None:
        assert request in self.tables or request in self.queued
        self.endings.append((request, ending))

    def release(self, request: RequestId) -> None:
        self.calls.append("release")
        self.queued.pop(request, None)
        table = self.tables.pop(request, None)
        if table is not None:
            self.filling = {key: owner for key, owner in self.filling.items() if owner != request}
            self._drop(table)

    def _drop(self, table: Table) -> None:
        self.refs[table.pages] -= 1
        held = set(self.sealed.values())
        for page in table.pages:
            if self.refs[page] == 0 and page not in held:
                self.memory[page] = 0xFF
                self.free.append(page)

    def report_wrong(self, request: RequestId, block: int, detail: str) -> None:
        self.calls.append("report_wrong")
        key = self.tables[request].keys[block]
        self.sealed.pop(key, None)
        self.wrong.append((block, detail))

    def take_back(self, prompt: Sequence[int]) -> None:
        """The block at the end of a prompt is found wrong by somebody else: it goes, with all that is below it."""
        for key in [key for key in self.sealed if key[: len(prompt)] == tuple(prompt)]:
            page = self.sealed.pop(key)
            if not self.refs[page]:
                self.free.append(page)

    def take_wrong(self) -> list[RequestId]:
        return [request for request in self.found_wrong if request in self.tables]

    def computing(self, steps: int) -> None:
        self.under_way.append(steps)

    def end_step(self) -> None:
        self.calls.append("end_step")

    def wait(self, timeout_s: float) -> None:
        self.calls.append("wait")

    def check_integrity(self) -> None:
        held = set(self.sealed.values()) | {page for table in self.tables.values() for page in table.pages}
        assert not held & set(self.free)
        assert len(held) + len(self.free) == len(self.memory)
        assert len(set(self.free)) == len(self.free)
        assert set(self.filling.values()) <= set(self.tables)
