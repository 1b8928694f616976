"""Who runs in the next step. Pure: no torch, no clock, no I/O but the block manager's calls, none of which waits.

Continuous batching under a token budget: running requests first, those that decode before those that still prefill
(in chunks), then waiting ones as far as budget and pages go. A waiting request that the block manager does not admit
yet (its prefix is being loaded, or computed by another request, or pages are short) is passed over, not waited for.
So that it does not starve behind smaller ones, nobody else is admitted once it was passed over `patience` steps. When
a decoding request finds no page, the newest running request is preempted: its pages go back, it is computed again.
"""

from collections import deque
from dataclasses import dataclass

from engine_adapter.base import BlockManager
from engine_adapter.engine.request import Chunk, Request

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step. With `grid_tokens` above 1, a chunk that does not end a request's tokens ends on that grid."""

    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    grid_tokens: int = 1
    patience: int = 64

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_waiting, self.grid_tokens, self.patience) < 1:
            raise ValueError(f"scheduler bounds must be positive: {self}")
        if self.max_batch_tokens < self.max_running + self.grid_tokens:
            # Else decoding requests could take the whole budget and a prefill would never go on.
            raise ValueError("max_batch_tokens must be at least max_running + grid_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts now, and preemptions since the start."""

    waiting: int
    running: int
    preemptions_total: int


class Scheduler:
    """Owns the queues and the calls to the block manager. One thread."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._preemptions_total = 0

    def add(self, request: Request) -> bool:
        """Queue a request and let its prefix be prefetched. False when the queue is full; nothing changed."""
        if len(self._waiting) >= self._config.max_waiting:
            return False
        self._waiting.append(request)
        self._blocks.enqueue(request.id, request.tokens)
        return True

    def remove(self, request: Request) -> None:
        """Finished or aborted: out of the queues, pages back. Not between `schedule` and its `complete`."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._blocks.release(request.id)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks; empty when nothing can run now. O(running + waiting looked at)."""
        chunks = self._decodes()
        budget = self._config.max_batch_tokens - len(chunks)
        for request in self._running:
            if request.num_pending > 1:
                budget -= self._add_chunk(chunks, request, budget)
        self._admit(chunks, budget)
        return chunks

    def complete(self, chunks: list[Chunk]) -> None:
        """The chunks' kernels have completed: commit what is full. Call before new tokens are appended."""
        block_tokens = self._blocks.block_tokens
        for chunk in chunks:
            request = chunk.request
            request.num_computed = chunk.end
            if chunk.end // block_tokens > request.num_committed // block_tokens:
                request.num_committed = chunk.end
                self._blocks.commit(request.id, request.tokens, chunk.end)

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        return SchedulerStats(
            waiting=len(self._waiting), running=len(self._running), preemptions_total=self._preemptions_total
        )

    def _decodes(self) -> list[Chunk]:
        return [
            Chunk(request=request, start=request.num_computed, end=len(request.tokens))
            for request in tuple(self._running)  # `_reserve` may preempt one that comes later
            if request.num_pending == 1 and request in self._running and self._reserve(request)
        ]

    def _add_chunk(self, chunks: list[Chunk], request: Request, budget: int) -> int:
        """Append as much of a prefill as the budget allows; the number of tokens taken."""
        start, end = request.num_computed, len(request.tokens)
        if end - start > budget:
            end = (start + budget) // self._config.grid_tokens * self._config.grid_tokens
        if end <= start:
            return 0
        chunks.append(Chunk(request=request, start=start, end=end))
        return end - start

    def _reserve(self, request: Request) -> bool:
        """Make room for a decoding request's next token, by preempting the newest request if need be.

        At most one is preempted: its pages may become free only after this step, and then the request goes on.
        """
        if self._blocks.reserve(request.id, len(request.tokens)):
            return True
        victim = self._running[-1]
        self._preempt(victim)
        return victim is not request and self._blocks.reserve(request.id, len(request.tokens))

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._blocks.release(request.id)
        request.num_computed = request.num_committed = 0
        request.num_preemptions += 1
        self._preemptions_total += 1
        self._waiting.appendleft(request)  # it was admitted before everybody who waits
        self._blocks.enqueue(request.id, request.tokens)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        passed_over: list[Request] = []
        config = self._config
        while self._waiting and len(self._running) < config.max_running and budget >= config.grid_tokens:
            if len(passed_over) == config.max_running:
                break  # so many cannot run anyway: a step's questions stay bounded
            request = self._waiting.popleft()
            admission = self._blocks.admit(request.id, len(request.tokens))
            if admission is None:
                passed_over.append(request)
                request.passed_over += 1
                if request.passed_over > config.patience:
                    break
                continue
            request.admission = request.admission or admission
            request.num_computed = request.num_committed = admission.cached_tokens
            request.passed_over = 0
            self._running.append(request)
            budget -= self._add_chunk(chunks, request, budget)
        self._waiting.extendleft(reversed(passed_over))
