"""An engine and a disk on a virtual clock, for the planner: real decisions, made-up costs, noisy measurements."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvstore.layout import Tier
from kvstore.planning.meeting import Meeting, Piece, piece_blocks
from kvstore.planning.planner import Ends, Plan, Question, Segment, Way, plan_request
from kvstore.planning.speeds import PrefillSpeed, SpeedMeter, TierSpeed

__all__ = ["BLOCK_TOKENS", "Served", "VirtualServer", "Workload"]

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one engine costs in truth: prefill, bytes of a block, tokens of a step."""

    name: str
    prefill: PrefillSpeed
    slot_bytes: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request, and what the two single ways would have taken."""

    plan: Plan
    ttft_s: float
    load_all_s: float
    compute_all_s: float

    @property
    def excess_s(self) -> float:
        """Above the promise: 5 % + 2 ms over the better of the two."""
        return self.ttft_s - 1.05 * min(self.load_all_s, self.compute_all_s) - 0.002

    @property
    def excess_share(self) -> float:
        """Of the better of the two."""
        return self.excess_s / min(self.load_all_s, self.compute_all_s)


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece on its way from the disk."""

    piece: Piece
    done_at: float
    asked_at: float
    nbytes: int  # those queued ahead of it among them


class VirtualServer:
    """Serves prompts of which the disk has every full block but the last; it measures what it does, with noise."""

    def __init__(
        self, workload: Workload, disk: TierSpeed, *, ends: Ends, noise: float, seed: int = 0
    ) -> None:
        self.workload = workload
        self.disk = disk
        self.ends = ends
        self.meter = SpeedMeter()
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def serve(self, tokens: int) -> Served:
        """One request from its plan to its first token."""
        work, cached = self.workload, (tokens - 1) // BLOCK_TOKENS
        segment = Segment(tier=Tier.NVME, begin=0, end=cached)
        question = Question(
            num_tokens=tokens,
            block_tokens=BLOCK_TOKENS,
            slot_bytes=work.slot_bytes,
            segments=(segment,),
            chunk_tokens=work.chunk_tokens,
            ends=self.ends,
        )
        plan = plan_request(question, self.meter.speeds())
        if plan.way is not Way.BOTH_ENDS:
            self.meter.other_way()
        if plan.way is Way.BOTH_ENDS:
            ttft_s = self._both(plan, tokens)
        elif plan.way is Way.LOAD:
            ttft_s = self._load(cached * work.slot_bytes) + self.compute(cached * BLOCK_TOKENS, tokens)
        else:
            ttft_s = self.compute(0, tokens)
        tail_s = work.prefill.seconds(cached * BLOCK_TOKENS, tokens, work.chunk_tokens)
        return Served(
            plan=plan,
            ttft_s=ttft_s,
            load_all_s=self.disk.seconds(cached * work.slot_bytes) + tail_s,
            compute_all_s=work.prefill.seconds(0, tokens, work.chunk_tokens),
        )

    def compute(self, begin: int, end: int) -> float:
        """Tokens [begin, end) in steps; their seconds."""
        total_s = 0.0
        while begin < end:
            stop = min(end, begin + self.workload.chunk_tokens)
            total_s += self._step(begin, stop)
            begin = stop
        return total_s

    def _measured(self, seconds: float) -> float:
        return seconds * float(np.exp(self._rng.normal(0.0, self._noise)))

    def _step(self, begin: int, end: int) -> float:
        seconds = self.workload.prefill.seconds(begin, end, self.workload.chunk_tokens)
        self.meter.computed(end - begin, 0.5 * (end * end - begin * begin), self._measured(seconds))
        return seconds

    def _load(self, nbytes: int) -> float:
        seconds = self.disk.seconds(nbytes)
        self.meter.loaded(Tier.NVME, nbytes, self._measured(seconds))
        return seconds

    def _both(self, plan: Plan, tokens: int) -> float:
        work = self.workload
        blocks = plan.cached_blocks - plan.load_end
        at = plan.load_end * BLOCK_TOKENS
        piece = piece_blocks(blocks, work.slot_bytes, self._both_speeds()[1])
        meeting = Meeting(begin=plan.load_end, end=plan.cached_blocks, piece=piece)
        reads: deque[_Read] = deque()
        now = 0.0
        self._ask(meeting, reads, now)
        while at < plan.cached_blocks * BLOCK_TOKENS:
            run = meeting.next_loaded
            if at == run.begin * BLOCK_TOKENS and run.end > run.begin:
                at = run.end * BLOCK_TOKENS
                meeting.advance(run.end)
                continue
            stop = meeting.stop(at, now, BLOCK_TOKENS, work.slot_bytes, self._both_speeds()) * BLOCK_TOKENS
            end = min(at + work.chunk_tokens, stop)
            if end <= at:
                now = max(now, reads[0].done_at)
            else:
                meeting.advance(end // BLOCK_TOKENS)
                now += self._step(at, end)
                at = end
            while reads and reads[0].done_at <= now:
                read = reads.popleft()
                self.meter.loaded_beside(read.nbytes, self._measured(read.done_at - read.asked_at))
                meeting.loaded(read.piece, read.done_at)
                meeting.piece = piece_blocks(blocks, work.slot_bytes, self._both_speeds()[1])
                self._ask(meeting, reads, read.done_at)
        self.meter.both_took(plan.meet_s, now)
        for read in reads:
            self.meter.not_loaded_beside(read.nbytes, now - read.asked_at)
        return now + self.compute(plan.cached_blocks * BLOCK_TOKENS, tokens)

    def _both_speeds(self) -> tuple[PrefillSpeed | None, TierSpeed | None]:
        speeds = self.meter.speeds()
        return speeds.prefill, speeds.behind

    def _ask(self, meeting: Meeting, reads: deque[_Read], now: float) -> None:
        for piece in meeting.ask(now):
            nbytes = len(piece) * self.workload.slot_bytes
            queued = sum(len(read.piece) for read in reads) * self.workload.slot_bytes
            begins_at = max(now + self.disk.start_s, reads[-1].done_at if reads else 0.0)
            done_at = begins_at + nbytes * self.disk.byte_s
            reads.append(_Read(piece, done_at, now, queued + nbytes))
