"""Requests of a trace served by one engine over the real store, on a virtual clock.

A request waits until the store gives it all its slots, has its hits in DRAM copied up, is computed, and decodes; what
it computed is copied down to DRAM behind it. The GPU computes one prompt after the other; decoding takes time and slots
and slows nobody. Links and disk have a rate and a queue each. What waits for the disk lets those behind it start, as
long as fewer than may run wait so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.simulate.clock import Channel, Clock
from bench.simulate.hardware import Model
from bench.simulate.tiered import Sizes, TieredStore
from bench.simulate.trace import Trace
from engine_adapter.loading.pace import Pace
from eviction.base import PolicyFactory, Stop
from kvstore.layout import Tier
from kvstore.moves import Grant, MoveKind, Outcome
from kvstore.store import Store
from kvstore.wire.packed import COPY

__all__ = ["Served", "Serving"]

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

_TICK_S = 0.25
_RETRY_S = 5.0  # the store says when to ask again; this long an engine trusts it
_MAX_RUNNING = 256
_TRIED_AT_ONCE = 16  # waiting requests that ask in a turn
_PORTION_BYTES = 256 << 20  # what a disk is given at once
_PROGRESS_REQUESTS = 64


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of a trace. Arrays have one element a request that was served."""

    ttft_s: F64
    hit_blocks: dict[str, int]
    prompt_blocks: int
    too_long: int  # prompts that HBM cannot hold: not served
    moved_bytes: dict[str, int]
    busy_s: dict[str, float]
    span_s: float  # until the last that happened: an answer, or what was moved behind it
    counters: dict[str, int]


@dataclass(slots=True, kw_only=True)
class _Request:
    number: int
    hashes: U64
    prompt_tokens: int
    output_tokens: int
    reserve: int
    found: NDArray[np.uint8]
    stop: Stop
    retry_s: float = 0.0
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unstored:
    """Blocks of a prompt in HBM that wait for room in DRAM."""

    slots: U32
    generations: U32


class Serving:
    """One run. `sizes` has at least a slot of HBM."""

    def __init__(
        self,
        trace: Trace,
        model: Model,
        sizes: Sizes,
        policy: PolicyFactory | None,
        speed: float,
        *,
        prefetch_share: float = 0.5,
        max_running: int = _MAX_RUNNING,
    ) -> None:
        self._trace, self._model, self._sizes = trace, model, sizes
        longest = int(np.diff(trace.offsets).max(initial=1))
        self._store = TieredStore(sizes, policy, most_blocks=max(longest, 1), prefetch_share=prefetch_share)
        self._names = np.random.default_rng(0).integers(1, 1 << 63, (trace.unique_blocks, 2), dtype=np.uint64)
        self._arrivals_s = (trace.time_ms - trace.time_ms[0]) / 1000 / speed
        self._clock = Clock()
        self._gpu, self._up, self._down, self._disk = Channel(), Channel(), Channel(), Channel()
        self._waiting: dict[int, _Request] = {}  # in order of arrival
        self._running = 0
        self._max_running = max_running
        self._pace = Pace()
        self._moving = False
        self._ticked_s = 0.0
        self._latest_s = 0.0
        self._unstored: deque[_Unstored] = deque()
        self._ttft_s: list[float] = []
        self._hits = np.zeros(len(Tier), dtype=np.int64)
        self._moved = {"dram_to_hbm": 0, "hbm_to_dram": 0, "nvme_to_dram": 0, "dram_to_nvme": 0}
        self._too_long = 0

    def run(self, progress: Callable[[float], None] = lambda _done: None) -> Served:
        """Serves all requests."""
        for number in range(len(self._trace)):
            self._at(self._arrivals_s[number], lambda number=number: self._arrive(number))  # type: ignore[misc]
        done = 0
        while self._clock.step():
            self._after()
            if len(self._ttft_s) - done >= _PROGRESS_REQUESTS:
                done = len(self._ttft_s)
                progress(done / len(self._trace))
        assert not self._waiting, "requests are left that nothing will start"
        return Served(
            ttft_s=np.asarray(self._ttft_s),
            hit_blocks={tier.name.lower(): int(self._hits[tier]) for tier in Tier},
            prompt_blocks=len(self._trace.blocks),
            too_long=self._too_long,
            moved_bytes=self._moved,
            busy_s={
                "gpu": self._gpu.busy_s,
                "dram_to_hbm": self._up.busy_s,
                "hbm_to_dram": self._down.busy_s,
                "disk": self._disk.busy_s,
            },
            span_s=max(self._latest_s, 1e-9),
            counters=dict(self._store.stats().counters),
        )

    @property
    def store(self) -> Store:
        """What is simulated."""
        return self._store.store

    def check_rankings(self) -> None:
        """Raises AssertionError where a policy's parts contradict each other."""
        self._store.check_rankings()

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        """Something happens then; a request that only looks again is no such thing and goes to the clock itself."""
        self._latest_s = max(self._latest_s, when_s)
        self._clock.at(when_s, action)

    # -- a request's life

    def _arrive(self, number: int) -> None:
        trace = self._trace
        tokens = int(trace.prompt_tokens[number])
        # One token is always computed, so the last block of a prompt is never a hit.
        full = min(len(trace.chain(number)), max(tokens - 1, 0) // trace.block_tokens)
        answer = int(trace.output_tokens[number])
        reserve = -(-(tokens + answer) // trace.block_tokens) - full
        if full + reserve > self._sizes.hbm:
            self._too_long += 1
            return
        hashes = self._names[trace.chain(number)[:full]]
        request = _Request(
            number=number,
            hashes=hashes,
            prompt_tokens=tokens,
            output_tokens=answer,
            reserve=reserve,
            found=self._store.found(hashes),
            stop=Stop(int(trace.stop[number])),
        )
        if len(request.found):
            self._store.prefetch(number, hashes, self._pace.expect(self._clock.now_s, len(self._waiting)))
        self._waiting[number] = request

    def _start_waiting(self) -> None:
        now_s = self._clock.now_s
        tried = passed_over = 0
        for request in list(self._waiting.values()):
            if max(self._running, passed_over) >= self._max_running or tried >= _TRIED_AT_ONCE:
                break  # as the bundled scheduler: it asks for no more than could run
            passed_over += 1
            if request.retry_s > now_s:
                if request.short:
                    break
                continue
            tried += 1
            answer = self._store.acquire(request.number, request.hashes, request.reserve)
            if answer.grant is not None:
                del self._waiting[request.number]
                self._running += 1
                passed_over -= 1
                self._pace.let_in(now_s, len(self._waiting))
                self._count_hits(request, answer.grant)
                self._load(request, answer.grant)
                continue
            request.retry_s = now_s + _RETRY_S
            self._clock.at(request.retry_s, _nothing)
            request.short = not answer.coming
            if request.short:  # of slots: whoever came later would take them away
                break

    def _count_hits(self, request: _Request, grant: Grant) -> None:
        hit = grant.outcomes != Outcome.MISS
        tiers = np.where(grant.outcomes[hit] == Outcome.HIT_HBM, Tier.HBM, Tier.DRAM)
        early = request.found[: len(tiers)]
        tiers[: len(early)][early == Tier.NVME] = Tier.NVME
        self._hits += np.bincount(tiers, minlength=len(Tier))

    def _load(self, request: _Request, grant: Grant) -> None:
        at = np.flatnonzero(grant.outcomes == Outcome.HIT_DRAM)
        if not len(at):
            self._compute(request, grant)
            return
        copies = _copies(
            grant.dram_slots[at], grant.dram_generations[at], grant.hbm_slots[at], grant.hbm_generations[at]
        )

        def loaded() -> None:
            self._store.loaded(copies)
            self._compute(request, grant)

        self._copy(self._up, "dram_to_hbm", len(at), loaded)

    def _compute(self, request: _Request, grant: Grant) -> None:
        cached = int(np.count_nonzero(grant.outcomes != Outcome.MISS)) * self._trace.block_tokens
        seconds = self._model.prefill_s(cached, request.prompt_tokens)
        done_s = self._gpu.take(self._clock.now_s, seconds)
        self._at(done_s, lambda: self._first_token(request, grant))

    def _first_token(self, request: _Request, grant: Grant) -> None:
        now_s = self._clock.now_s
        self._ttft_s.append(now_s - float(self._arrivals_s[request.number]))
        published = self._store.seal(request.hashes, grant)
        if len(published) and self._sizes.dram:
            slots = grant.hbm_slots[published]
            self._store.hold(Tier.HBM, slots)
            self._unstored.append(_Unstored(slots=slots, generations=grant.hbm_generations[published]))
        decode_s = self._model.decode_s(request.prompt_tokens, request.output_tokens)
        self._at(now_s + decode_s, lambda: self._end(request, grant))

    def _end(self, request: _Request, grant: Grant) -> None:
        self._running -= 1
        self._store.ended(request.hashes, request.stop)
        self._store.release(hbm=np.concatenate((grant.hbm_slots, grant.reserve_slots)))

    # -- behind requests

    def _after(self) -> None:
        """What every turn of the loop does: stores, moves of the disk, the background, requests that may start."""
        self._store.tell_time(self._clock.now_s)
        self._store_down()
        if self._clock.now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = self._clock.now_s
            self._store.tick()
        self._feed_disk()
        for number in self._store.changed():
            if number in self._waiting:
                self._waiting[number].retry_s = 0.0
        self._start_waiting()
        self._feed_disk()  # what these wait for: perhaps nothing else happens before it has come

    def _store_down(self) -> None:
        """Copies what was computed to DRAM, as far as there is room; what has none while HBM is short is given up."""
        while self._unstored:
            part = self._unstored.popleft()
            room = self._store.room(len(part.slots))
            got = 0 if room is None else len(room.dram_slots)
            if room is not None and got:
                copies = _copies(
                    part.slots[:got], part.generations[:got], room.dram_slots, room.dram_generations
                )
                self._copy(self._down, "hbm_to_dram", got, partial(self._store.stored, copies))
            if got < len(part.slots):
                rest = replace(part, slots=part.slots[got:], generations=part.generations[got:])
                if self._waiting:  # for HBM, perhaps for this
                    self._store.release(hbm=rest.slots)
                else:
                    self._unstored.appendleft(rest)
                return

    def _feed_disk(self) -> None:
        if self._moving or not self._sizes.nvme:
            return
        moves = self._store.take_moves(max(1, _PORTION_BYTES // self._sizes.slot_bytes))
        if not len(moves):
            return
        hardware, slot_bytes = self._model.hardware, self._sizes.slot_bytes
        reads = int(np.count_nonzero(moves["kind"] == MoveKind.READ))
        read_bytes, write_bytes = reads * slot_bytes, (len(moves) - reads) * slot_bytes
        self._moved["nvme_to_dram"] += read_bytes
        self._moved["dram_to_nvme"] += write_bytes
        seconds = hardware.disk_latency_s + read_bytes / hardware.disk_read_bytes_per_s
        seconds += write_bytes / hardware.disk_write_bytes_per_s
        self._moving = True

        def moved() -> None:
            self._moving = False
            self._store.moved(moves)

        self._at(self._disk.take(self._clock.now_s, seconds), moved)

    def _copy(self, link: Channel, way: str, blocks: int, done: Callable[[], None]) -> None:
        nbytes = blocks * self._sizes.slot_bytes
        self._moved[way] += nbytes
        seconds = nbytes / self._model.hardware.copy_bytes_per_s
        self._at(link.take(self._clock.now_s, seconds), done)


def _nothing() -> None:
    """The loop turns once more."""


def _copies(sources: U32, source_generations: U32, targets: U32, target_generations: U32) -> NDArray[np.void]:
    records = np.zeros(len(sources), dtype=COPY)
    records["source"], records["source_generation"] = sources, source_generations
    records["target"], records["target_generation"] = targets, target_generations
    return records
