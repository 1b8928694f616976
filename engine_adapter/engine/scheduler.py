"""Who runs in the next step. Pure: no torch, no clock, no I/O but the block manager's calls, none of which waits.

Continuous batching under a token budget: running requests first, those that decode before those that still prefill
(in chunks), then waiting ones as far as budget and pages go. A waiting request that the block manager does not admit
yet (its prefix is being loaded, or computed by another request, or pages are short) is passed over, not waited for.
So that it does not starve behind smaller ones, nobody else is admitted once it was passed over `patience` steps. When
a decoding request finds no page, the newest running request is preempted: its pages go back, it is computed again.

A step goes `schedule` → `launched` → `complete`, and the next one may be scheduled and launched before the one before
it is complete; steps complete in their order. Pages that a launched step may still write stay with their request until
that step is complete, whatever became of the request meanwhile.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import BlockManager, RequestId
from engine_adapter.engine.request import UNKNOWN, Chunk, Request
from kvstore.errors import Unavailable

__all__ = ["Refused", "Scheduler", "SchedulerConfig", "SchedulerStats"]

_PREPARED = 4
"""Requests at the front of the queue whose prefix is loaded while others have the step."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that will never be admitted, and why."""

    request: Request
    error: Unavailable


class Scheduler:
    """Owns the queues and the calls to the block manager. One thread."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._preempted: list[
            Request
        ] = []  # in launched steps still; they wait again when those are complete
        self._removed: dict[RequestId, Request] = {}  # the same, and their pages go back
        self._refused: list[Refused] = []
        self._preemptions_total = 0

    def add(self, request: Request, packed: NDArray[np.uint32] | None = None) -> bool:
        """Queue a request and let its prefix be prefetched. False when the queue is full; nothing changed.

        `packed`: its tokens as an array, where the caller has made one.
        """
        if len(self._waiting) >= self._config.max_waiting:
            return False
        full = len(self._running) >= self._config.max_running
        ahead = len(self._waiting) + (1 if full else 0)
        self._waiting.append(request)
        self._blocks.enqueue(request.id, request.tokens if packed is None else packed, ahead=ahead)
        return True

    def remove(self, request: Request) -> None:
        """Finished or aborted: out of the queues, pages back. Not between `schedule` and its `launched`.

        A step that was scheduled and could not be launched is as if it had not been scheduled.
        """
        for queue in (self._running, self._preempted, self._waiting):
            if request in queue:
                queue.remove(request)
        if request.num_in_flight:
            self._removed[request.id] = request
        else:
            self._blocks.release(request.id)

    def is_leaving(self, request_id: RequestId) -> bool:
        """Whether a launched step still uses pages of a removed request of that name: it cannot be added yet."""
        return request_id in self._removed

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks; empty when nothing can run now. O(running + waiting looked at)."""
        chunks = self._decodes()
        budget = self._config.max_batch_tokens - len(chunks)
        for request in self._running:
            if request.num_pending > 1:
                budget -= self._add_chunk(chunks, request, budget)
        self._admit(chunks, budget)
        return chunks

    def take_refused(self) -> list[Refused]:
        """Requests that the block manager refused since the last call; each is to be removed."""
        refused, self._refused = self._refused, []
        return refused

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """The chunks' kernels are under way: what they compute counts as computed, what they choose is unknown yet."""
        for chunk in chunks:
            request = chunk.request
            request.arriving = None  # the step has waited for all layers
            request.num_computed = chunk.end
            request.num_in_flight += 1
            if chunk.samples:
                request.tokens.append(UNKNOWN)

    def complete(self, chunks: Sequence[Chunk], chosen: Sequence[int]) -> list[Chunk]:
        """The kernels of the oldest launched step have completed; `chosen` are its tokens, one for each that samples.

        Fills those in, commits what is full and gives back the pages of requests that left meanwhile. Returns the
        chunks whose tokens are of use: those that sample, of requests that did not leave.
        """
        tokens, useful = iter(chosen), []
        for chunk in chunks:
            request = chunk.request
            token = next(tokens) if chunk.samples else UNKNOWN
            request.num_in_flight -= 1
            if self._removed.get(request.id) is request:
                self._leave(request)
                continue
            if chunk.samples:
                request.tokens[chunk.end] = token
                useful.append(chunk)
            self._commit(request, chunk.end)
            if not request.num_in_flight and request in self._preempted:
                self._preempted.remove(request)
                self._requeue(request)
        return useful

    def _leave(self, request: Request) -> None:
        if not request.num_in_flight:
            del self._removed[request.id]
            self._blocks.release(request.id)

    def _commit(self, request: Request, num_tokens: int) -> None:
        block_tokens = self._blocks.block_tokens
        if num_tokens // block_tokens > request.num_committed // block_tokens:
            request.num_committed = num_tokens
            self._blocks.commit(request.id, request.tokens, num_tokens)

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        return SchedulerStats(
            waiting=len(self._waiting) + len(self._preempted),
            running=len(self._running),
            preemptions_total=self._preemptions_total,
        )

    def _decodes(self) -> list[Chunk]:
        return [
            Chunk(request=request, start=request.num_computed, end=len(request.tokens))
            for request in tuple(self._running)  # `_reserve` may preempt one that comes later
            if request.num_pending == 1 and request in self._running and self._reserve(request)
        ]

    def _add_chunk(self, chunks: list[Chunk], request: Request, budget: int) -> int:
        """Append as much of a prefill as the budget allows and is not being loaded; the number of tokens taken."""
        reach = self._blocks.reach(request.id, request.num_computed)
        if reach.computed_tokens > request.num_computed:
            request.num_overtaken += reach.computed_tokens - request.num_computed
            request.num_computed = reach.computed_tokens
        start, end = request.num_computed, min(len(request.tokens), reach.stop_tokens)
        if end - start > budget:
            end = (start + budget) // self._config.grid_tokens * self._config.grid_tokens
        if end <= start:
            return 0
        chunks.append(Chunk(request=request, start=start, end=end))
        return end - start

    def _reserve(self, request: Request) -> bool:
        """Make room for a decoding request's next token, by preempting the newest request if need be.

        At most one is preempted: its pages may become free only after this step, and then the request goes on. Nobody
        is while pages of one that was are still in a launched step.
        """
        if self._blocks.reserve(request.id, len(request.tokens)):
            return True
        if self._preempted:
            return False
        victim = self._running[-1]
        self._preempt(victim)
        return victim is not request and self._blocks.reserve(request.id, len(request.tokens))

    def restart(self, request: Request) -> None:
        """What a request has computed is wrong: again from the start, where it runs. No step is in flight."""
        if request in self._running:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        self._preemptions_total += 1
        if request.num_in_flight:
            self._preempted.append(request)
        else:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._blocks.release(request.id)
        request.num_computed = request.num_committed = 0
        request.arriving = None
        self._waiting.appendleft(request)  # it was admitted before everybody who waits
        self._blocks.enqueue(request.id, request.tokens)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        passed_over: list[Request] = []
        config = self._config
        while self._waiting and len(self._running) < config.max_running and budget >= config.grid_tokens:
            if len(passed_over) == config.max_running:
                break  # so many cannot run anyway: a step's questions stay bounded
            request = self._waiting.popleft()
            try:
                admission = self._blocks.admit(request.id, len(request.tokens))
            except Unavailable as error:
                self._refused.append(Refused(request=request, error=error))
                continue
            if admission is None:
                passed_over.append(request)
                request.passed_over += 1
                if request.passed_over > config.patience:
                    break
                continue
            request.admission = request.admission or admission
            request.num_computed = request.num_committed = admission.cached_tokens
            request.arriving = admission.arriving
            request.passed_over = 0
            self._running.append(request)
            budget -= self._add_chunk(chunks, request, budget)
        if not passed_over:
            for request in islice(self._waiting, _PREPARED):
                self._blocks.prepare(request.id)
        self._waiting.extendleft(reversed(passed_over))
