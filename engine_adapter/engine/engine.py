"""The engine: requests in, tokens and text out, one step at a time.

One thread calls everything. A step schedules and launches, then takes in what the oldest launched step chose, commits
what it wrote and tells the block manager; it waits for nothing but kernels. With `overlap` 1 a step stays in flight
while the next one is scheduled and launched, so the GPU never waits for the host: stop conditions then take effect one
step late, and the token that was computed too much is dropped. With 0, and for steps that draw at random on the host,
each step ends before the next one is scheduled. `idle_wait` is for a step that had nothing to compute although
requests wait.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.base import BlockManager, RequestId
from engine_adapter.endings import ending_of
from engine_adapter.engine.arriving import LateKv
from engine_adapter.engine.attention.tiled import GRID_TOKENS
from engine_adapter.engine.canary import Canary
from engine_adapter.engine.detokenizer import Detokenizer
from engine_adapter.engine.errors import InvalidRequest
from engine_adapter.engine.kv_pool import view_pages
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.request import Chunk, FinishReason, Request
from engine_adapter.engine.runner import LaunchedStep, Runner
from engine_adapter.engine.runners import make_runner
from engine_adapter.engine.sampler import SamplingParams, sample
from engine_adapter.engine.scheduler import Scheduler, SchedulerConfig, SchedulerStats
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.token_buffer import TokenBuffer
from kvstore.errors import Corruption, InvalidArgument, KvstoreError, Unavailable
from kvstore.faults import fault
from kvstore.identity import packed_tokens

__all__ = ["Completion", "Engine", "Output", "RequestStats"]

_IDLE_WAIT_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Of one request. Times in seconds: `ttft_s` from acceptance to the first token, `total_s` to the last.

    `tokens_per_s` counts the tokens after the first; 0 where there are none. Cached tokens are those of the request's
    first admission.
    """

    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    generated_tokens: int
    preemptions: int
    ttft_s: float
    total_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step added to one request; with `finish` set it is the last, and `stats` are there.

    `error`: why it failed, where `finish` says so.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None
    stats: RequestStats | None = None
    error: KvstoreError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer, for callers that do not stream."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    stats: RequestStats


@dataclass(slots=True)
class _Live:
    """A request and what the engine keeps beside it."""

    request: Request
    params: SamplingParams
    detokenizer: Detokenizer
    accepted_at: float
    first_token_at: float | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A launched step; `sampling` has the parameters of each chunk that samples."""

    chunks: list[Chunk]
    step: LaunchedStep
    sampling: list[SamplingParams]
    launched_at: float
    waited: bool
    """Whether its launch waited for a load."""

    @property
    def draws(self) -> bool:
        """Whether somebody draws at random from its logits, which happens on the host."""
        return any(params.temperature > 0.0 for params in self.sampling)


class Engine:
    """Runs one model over one block manager."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: BlockManager,
        settings: EngineSettings,
        clock: Callable[[], float] = time.perf_counter,
        make_runner: Callable[[LoadedModel, Tensor, EngineSettings], Runner] = make_runner,
    ) -> None:
        """ValueError when the pages do not fit the model, ConfigError when they do not nest with the grid.

        `make_runner` is for tests: a runner over the pool's pages.
        """
        self.loaded = loaded
        self._blocks = blocks
        self._clock = clock
        pages = blocks.kv_pages()
        pool = view_pages(pages, loaded.config, blocks.block_tokens, loaded.model.dtype)
        self._max_tokens = min(loaded.max_tokens, pool.shape[0] * blocks.block_tokens)
        self._runner = make_runner(loaded, pool, settings)
        self._canary = _canary(self._runner, pool, blocks.block_tokens, settings)
        self._overlap = settings.overlap
        self._in_flight: deque[_InFlight] = deque()
        self._held: list[Output] = []  # outputs that came out between two steps
        grid = GRID_TOKENS if settings.deterministic else 1
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_batch_tokens=max(settings.chunk_tokens, grid) + settings.max_running,
                max_running=settings.max_running,
                max_waiting=settings.max_waiting,
                grid_tokens=grid,
            ),
            blocks,
        )
        self._live: dict[RequestId, _Live] = {}
        self._numbers = itertools.count()
        self._idle = False
        self._ended_at = 0.0  # when the last step ended

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or any step."""
        return bool(self._live or self._in_flight or self._held)

    @property
    def max_tokens(self) -> int:
        """The longest request, prompt and answer, that model and pool allow."""
        return self._max_tokens

    def prepare(self) -> None:
        """Do now what would hold up the first requests once (graphs, on a GPU)."""
        self._runner.prepare()

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: RequestId | None = None
    ) -> RequestId:
        """Accept a request; its clock starts. Text is taken as it is (see `TextTokenizer.encode_chat` for chats).

        InvalidRequest: empty, too long, out of the vocabulary, a live id, or too many waiting. An answer that would
        pass the longest request is cut short there.
        """
        accepted_at = self._clock()
        packed = self._checked(self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if request_id is None:
            request_id = RequestId(f"request-{next(self._numbers)}")
        if request_id in self._live:
            raise InvalidRequest(f"request {request_id!r} is running already")
        if self._scheduler.is_leaving(request_id):
            self._settle()
        limit_tokens = min(len(packed) + params.max_new_tokens, self._max_tokens)
        request = Request(
            id=request_id,
            tokens=TokenBuffer(packed, limit_tokens),
            num_prompt=len(packed),
            limit_tokens=limit_tokens,
        )
        if not self._scheduler.add(request, packed):
            raise InvalidRequest("too many requests are waiting: try again later")
        self._live[request_id] = _Live(
            request, params, Detokenizer(self.loaded.tokenizer.decode), accepted_at
        )
        return request_id

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.uint32]:
        """The prompt as an array: converted once, which takes 0.8 ms for 131,072 tokens."""
        if not len(tokens):
            raise InvalidRequest("the prompt is empty")
        if len(tokens) >= self._max_tokens:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, at most {self._max_tokens - 1} fit")
        try:
            packed = packed_tokens(tokens)
        except InvalidArgument:
            packed = None
        if packed is None or packed.max() >= self.loaded.config.vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {self.loaded.config.vocab_size - 1}")
        return packed

    def abort(self, request_id: RequestId) -> Output | None:
        """End a request now; its last output. None when it is not running (any more).

        Its pages go back at once, or when the step that is computing in them has ended.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        live.request.forget_unknown()
        return self._finish(live, (), FinishReason.ABORTED)

    def step(self) -> list[Output]:
        """Compute one step; what came out of it. Empty when nothing could run: see `idle_wait`."""
        if self._canary is not None and self._canary.due:
            self._look_again(self._canary)
        for request_id in self._blocks.take_wrong():
            self._start_over(request_id)
        outputs, self._held = self._held, []
        chunks = self._scheduler.schedule()
        outputs += [self._fail(self._live[it.request.id], it.error) for it in self._scheduler.take_refused()]
        if chunks:
            try:
                self._launch(chunks)
            except LateKv as late:  # nothing of the step runs; the others are scheduled again
                chunks = []
                outputs += self._give_up_load(late.request)
            if self._canary is not None:
                self._canary.admitted(chunks)
        self._idle = not chunks and not self._in_flight
        depth = self._overlap if chunks and not self._in_flight[-1].draws else 0
        while len(self._in_flight) > depth:
            outputs += self._retire()
        if self._idle or not self.has_work:
            self._blocks.computing(0)
        self._blocks.end_step()
        return outputs

    def idle_wait(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """After a step that computed nothing, sleep until the block manager may admit somebody; else return."""
        if self._idle:
            self._blocks.wait(timeout_s)

    def _look_again(self, canary: Canary) -> None:
        """Compute a cached block of a running request again. One that is wrong ends the request: its answer is, too."""
        request = canary.take()
        self._settle()
        live = self._live.get(request.id)
        cached = request.admission.cached_tokens if request.admission else 0
        if live is None or live.request is not request or request.num_computed < max(1, cached):
            return  # it has ended, or was preempted
        pages = self._blocks.pages(request.id)
        tokens = (len(pages) + 1) * self._blocks.block_tokens
        if tokens > self._max_tokens or not self._blocks.reserve(request.id, tokens):
            return  # no page to spare
        block, difference = canary.check(request, self._blocks.pages(request.id))
        if difference:
            self._blocks.report_wrong(request.id, block, difference)
            error = Corruption(f"block {block} of the cached prefix is wrong: {difference}; ask again")
            self._held.append(self._fail(live, error))

    def _start_over(self, request_id: RequestId) -> None:
        """A block that a request was computed with is wrong: again from the start, unless some of its answer is out."""
        self._settle()
        live = self._live.get(request_id)
        if live is None:
            return
        if live.request.num_generated:
            error = Corruption("a block of the cached prefix was found wrong after it was used; ask again")
            self._held.append(self._fail(live, error))
        else:
            self._scheduler.restart(live.request)

    def _give_up_load(self, request: Request) -> list[Output]:
        """Its cached prefix does not come: it fails, or, where what came is another, it is computed from the start.

        The latter also where some of its answer is out, as of one that was preempted: none of that is of what came.
        """
        if request.arriving is None or not request.arriving.differs:
            return [self._fail(self._live[request.id], _not_loaded(request))]
        self._settle()
        self._scheduler.restart(request)
        held, self._held = self._held, []
        return held

    def _launch(self, chunks: list[Chunk]) -> None:
        tables: list[NDArray[np.int32]] = [self._blocks.pages(chunk.request.id) for chunk in chunks]
        self._blocks.computing(len(self._in_flight) + 1)
        launched_at = time.perf_counter()
        waited = any(chunk.request.arriving is not None for chunk in chunks)
        step = self._runner.launch(chunks, tables)
        self._scheduler.launched(chunks)
        sampling = [self._live[chunk.request.id].params for chunk in chunks if chunk.samples]
        launched = _InFlight(
            chunks=chunks, step=step, sampling=sampling, launched_at=launched_at, waited=waited
        )
        self._in_flight.append(launched)
        fault("step.launched")

    def _retire(self) -> list[Output]:
        """Wait for the oldest launched step and take in what it computed: nothing is committed before that."""
        ended = self._in_flight.popleft()
        ended.step.wait()
        self._time(ended)
        fault("step.done")
        useful = self._scheduler.complete(ended.chunks, self._choose(ended))
        return [self._accept(self._live[c.request.id], c.request.tokens[c.end], c.end) for c in useful]

    def _time(self, ended: _InFlight) -> None:
        """Tells what a step of prefill took: from its launch, or from the end of the one before it."""
        now = time.perf_counter()
        spans = [(chunk.start, chunk.end) for chunk in ended.chunks if chunk.end - chunk.start > 1]
        if spans and not ended.waited:
            self._blocks.computed(spans, now - max(ended.launched_at, self._ended_at))
        self._ended_at = now

    def _choose(self, ended: _InFlight) -> list[int]:
        """The token of each chunk that samples."""
        if not ended.draws:
            return ended.step.tokens()
        indices = [chunk.end - chunk.request.num_prompt for chunk in ended.chunks if chunk.samples]
        return sample(ended.step.logits(), ended.sampling, indices)

    def _settle(self) -> None:
        """End every launched step; what comes out of it is kept for the next step's caller."""
        while self._in_flight:
            self._held += self._retire()

    def _accept(self, live: _Live, token: int, position: int) -> Output:
        """Take the token chosen for `position`; an end-of-turn token ends the request and is not part of its answer."""
        if live.first_token_at is None:
            live.first_token_at = self._clock()
        request = live.request
        if token in self.loaded.config.eos_token_ids and not live.params.ignore_eos:
            answer = request.tokens[request.num_prompt : position + 1]
            self._blocks.ended(request.id, ending_of(answer, self.loaded.tokenizer.tool_tokens))
            del request.tokens[position:]
            return self._finish(live, (), FinishReason.STOP)
        assert request.limit_tokens is not None
        if position + 1 >= request.limit_tokens:
            return self._finish(live, (token,), FinishReason.LENGTH)
        return Output(request_id=request.id, token_ids=(token,), text=live.detokenizer.push((token,)))

    def _finish(self, live: _Live, token_ids: tuple[int, ...], reason: FinishReason) -> Output:
        del self._live[live.request.id]
        self._scheduler.remove(live.request)
        text = live.detokenizer.push(token_ids) + live.detokenizer.flush()
        return Output(
            request_id=live.request.id, token_ids=token_ids, text=text, finish=reason, stats=self._stats(live)
        )

    def _fail(self, live: _Live, error: KvstoreError) -> Output:
        return replace(self._finish(live, (), FinishReason.FAILED), error=error)

    def _stats(self, live: _Live) -> RequestStats:
        now, request, admission = self._clock(), live.request, live.request.admission
        first = now if live.first_token_at is None else live.first_token_at
        later = request.num_generated - 1
        return RequestStats(
            prompt_tokens=request.num_prompt,
            cached_tokens=(admission.cached_tokens if admission else 0) + request.num_overtaken,
            cached_by_tier=_by_tier(request),
            generated_tokens=request.num_generated,
            preemptions=request.num_preemptions,
            ttft_s=first - live.accepted_at,
            total_s=now - live.accepted_at,
            tokens_per_s=later / (now - first) if later > 0 and now > first else 0.0,
        )

    def run(self) -> Iterator[Output]:
        """Step until no request is left, waiting where nothing can run."""
        while self.has_work:
            yield from self.step()
            self.idle_wait()

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Completion]:
        """Answer `prompts` together; answers in their order. Only when no other request is live.

        Raises, when all have ended, what one of them failed with.
        """
        if self.has_work:
            raise InvalidRequest("generate needs an engine without other requests")
        ids = [self.add_request(prompt, params) for prompt in prompts]
        parts: dict[RequestId, list[Output]] = {request_id: [] for request_id in ids}
        for output in self.run():
            parts[output.request_id].append(output)
        return [_join(parts[request_id]) for request_id in ids]

    def stats(self) -> SchedulerStats:
        """Queue lengths and preemptions."""
        return self._scheduler.stats()


def _not_loaded(request: Request) -> Unavailable:
    cached = request.admission.cached_tokens if request.admission else 0
    return Unavailable(f"its cached prefix of {cached:,} tokens was not loaded from DRAM in time; ask again")


def _by_tier(request: Request) -> Mapping[str, int]:
    """Cached tokens by the tier that they were found in: a disk, where they were loaded beside a computation."""
    found = dict(request.admission.cached_by_tier) if request.admission else {}
    if request.num_overtaken:
        found["nvme"] = found.get("nvme", 0) + request.num_overtaken
    return found


def _canary(runner: Runner, pool: Tensor, block_tokens: int, settings: EngineSettings) -> Canary | None:
    """None where it is not wanted, and where nobody knows how much may differ: on a GPU outside deterministic mode."""
    comparable = settings.deterministic or settings.device == "cpu"
    if not settings.canary_every or settings.tensor_parallel > 1 or not comparable:
        return None
    return Canary(runner, pool, block_tokens, every=settings.canary_every, exact=settings.deterministic)


def _join(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    if last.error is not None:
        raise last.error
    assert last.finish is not None
    assert last.stats is not None
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish=last.finish,
        stats=last.stats,
    )
