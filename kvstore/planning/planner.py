"""Load or recompute: how much of a cached prefix a request loads, and how much it computes again.

Owns the choice, made anew for each request from what prefill and the tiers cost lately (`speeds`). Its promise:
where the costs are known, the time to the first token is never more than 5 % + 2 ms above the better of loading all
that is cached and computing all that HBM has not. Pure.

Three ways. LOAD: the leading blocks up to `load_end` are loaded, then the rest is computed. COMPUTE: what would have to
come from a slow tier is computed. BOTH_ENDS: blocks are computed from the front while others are loaded from the back,
until they meet (`meeting`): with a disk about as fast as prefill that takes half the time of either. A load in
front of a computation is only ever worth it up to where a faster tier ends: within one tier each further block costs
the same to load, and ever more to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import Tier
from kvstore.planning.speeds import PrefillSpeed, Speeds, TierSpeed

__all__ = ["Ends", "Plan", "Question", "Segment", "Way", "plan_request", "segments_of"]

_WORTH_SHARE, _WORTH_S = 0.05, 0.002
"""What both ends must gain over the better single way: they take more of the engine than a load does."""
_MARGIN = 0.1
_GUESS = 8
"""Steps so many times larger than any measured are not believed to cost what the line says."""
_MAX_SEGMENTS = 8
"""Leading runs of one tier that are told apart; what lies behind them is taken as of the slowest tier among it."""


class Way(IntEnum):
    """How a request gets its cached prefix."""

    LOAD = 0
    COMPUTE = 1
    BOTH_ENDS = 2


class Ends(IntEnum):
    """Where an engine can compute while blocks are loaded: nowhere, or in front of them."""

    FRONT = 0
    BOTH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks [begin, end) of the cached prefix, all found in one tier."""

    tier: Tier
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request."""

    num_tokens: int
    """To be in the pages before the first token can be chosen."""
    block_tokens: int
    slot_bytes: int
    segments: tuple[Segment, ...]
    """The cached prefix, from block 0 on; `segments_of` makes them."""
    chunk_tokens: int
    ends: Ends
    queued_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """What a tier has to load for others first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request does. Blocks up to `load_end` are loaded first; those of [meet, cached) are loaded beside it."""

    way: Way
    cached_blocks: int
    load_end: int
    meet: int
    """Where both ends are expected to meet; `cached_blocks` where nothing is loaded from the back."""
    expected_s: float
    """To the first token; with the next two, 0 where something was not measured yet."""
    load_all_s: float
    compute_all_s: float
    meet_s: float = 0.0
    """Until both ends meet, as their speeds by themselves say; 0 where they do not, or something was not measured."""

    @property
    def loaded_blocks(self) -> int:
        """Blocks that are not computed, those in HBM among them."""
        return self.load_end + self.cached_blocks - self.meet


def segments_of(tiers: NDArray[np.uint8]) -> tuple[Segment, ...]:
    """Runs of the leading cached blocks, of which `tiers` [n] has the highest tier of each. O(n)."""
    if not len(tiers):
        return ()
    edges = np.flatnonzero(np.diff(tiers)) + 1
    bounds = [0, *edges.tolist(), len(tiers)]
    runs = [Segment(tier=Tier(int(tiers[begin])), begin=begin, end=end) for begin, end in pairwise(bounds)]
    if len(runs) > _MAX_SEGMENTS:
        rest = runs[_MAX_SEGMENTS - 1 :]
        slowest = max(run.tier for run in rest)
        runs[_MAX_SEGMENTS - 1 :] = [Segment(tier=slowest, begin=rest[0].begin, end=rest[-1].end)]
    merged = []
    for tier, group in groupby(runs, key=lambda run: run.tier):
        same = list(group)
        merged.append(Segment(tier=tier, begin=same[0].begin, end=same[-1].end))
    return tuple(merged)


def plan_request(question: Question, speeds: Speeds) -> Plan:
    """The way that is expected to be soonest. O(segments x log blocks)."""
    cached = question.segments[-1].end if question.segments else 0
    in_hbm = _in_hbm(question)
    needed = {segment.tier for segment in question.segments} - {Tier.HBM}
    if not needed:
        return _plan(Way.LOAD, cached, cached, cached)
    if needed - set(speeds.tiers) or not _proven(question, speeds.prefill):
        return _unmeasured(question, cached)
    assert speeds.prefill is not None
    costs = _Costs(question, speeds.prefill, speeds)
    load_all_s = costs.single(cached)
    compute_all_s = costs.single(in_hbm)
    edges = [segment.end for segment in question.segments if segment.end >= in_hbm]
    load_end = min([in_hbm, *edges], key=costs.single)
    best_s = costs.single(load_end)
    way = Way.LOAD if load_end == cached else Way.COMPUTE
    found = _plan(way, cached, load_end, cached, best_s, load_all_s, compute_all_s)
    if question.ends is Ends.BOTH:
        front = _quick_end(question)
        meet, meet_s, after_s = costs.both(front)
        both_s = meet_s * speeds.both_factor + after_s
        if front < meet < cached and both_s < best_s * (1.0 - _WORTH_SHARE) - _WORTH_S:
            plan = _plan(Way.BOTH_ENDS, cached, front, meet, both_s, load_all_s, compute_all_s)
            return replace(plan, meet_s=meet_s)
    return found


def _plan(
    way: Way,
    cached: int,
    load_end: int,
    meet: int,
    expected_s: float = 0.0,
    load_all_s: float = 0.0,
    compute_all_s: float = 0.0,
) -> Plan:
    return Plan(
        way=way,
        cached_blocks=cached,
        load_end=load_end,
        meet=meet,
        expected_s=expected_s,
        load_all_s=load_all_s,
        compute_all_s=compute_all_s,
    )


def _proven(question: Question, prefill: PrefillSpeed | None) -> bool:
    """Whether steps were measured that are anywhere near as large as those that would compute what is cached."""
    largest = min(question.chunk_tokens, question.num_tokens - _in_hbm(question) * question.block_tokens)
    return prefill is not None and prefill.proven_tokens * _GUESS >= largest


def _unmeasured(question: Question, cached: int) -> Plan:
    """Both ends where a disk is asked and the engine can: whichever is faster then decides. Else the load."""
    front = _quick_end(question)
    if question.ends is Ends.BOTH and front < cached:
        return _plan(Way.BOTH_ENDS, cached, front, front)
    return _plan(Way.LOAD, cached, cached, cached)


def _in_hbm(question: Question) -> int:
    """Leading blocks that are there."""
    first = question.segments[0] if question.segments else None
    return first.end if first is not None and first.tier is Tier.HBM else 0


def _quick_end(question: Question) -> int:
    """Leading blocks that no disk has to give."""
    slow = [segment.begin for segment in question.segments if segment.tier >= Tier.NVME]
    return slow[0] if slow else question.segments[-1].end


class _Costs:
    """Seconds of one request by what it loads."""

    def __init__(self, question: Question, prefill: PrefillSpeed, speeds: Speeds) -> None:
        self._question = question
        self._prefill = prefill
        self._alone = speeds.tiers
        self._beside = {**speeds.tiers, **({Tier.NVME: speeds.behind} if speeds.behind else {})}
        self._cached = question.segments[-1].end

    def load(self, begin: int, end: int, tiers: Mapping[Tier, TierSpeed]) -> float:
        """Blocks [begin, end), a tier after the other."""
        question, found = self._question, 0.0
        blocks: dict[Tier, int] = {}
        for segment in question.segments:
            inside = min(end, segment.end) - max(begin, segment.begin)
            if inside > 0 and segment.tier is not Tier.HBM:
                blocks[segment.tier] = blocks.get(segment.tier, 0) + inside
        for tier, count in blocks.items():
            found += tiers[tier].seconds(count * question.slot_bytes + question.queued_bytes.get(tier, 0))
        return found

    def compute(self, begin: int, end_tokens: int) -> float:
        """From a block to a token."""
        question = self._question
        return self._prefill.seconds(begin * question.block_tokens, end_tokens, question.chunk_tokens)

    def single(self, load_end: int) -> float:
        """The leading blocks are loaded, then all others computed."""
        return self.load(0, load_end, self._alone) + self.compute(load_end, self._question.num_tokens)

    def both(self, front: int) -> tuple[int, float, float]:
        """Where loads from the back meet a computation that begins at `front`; seconds until then, and from then on."""
        question = self._question
        before_s, after_s = self.load(0, front, self._alone), self.compute(self._cached, question.num_tokens)

        def computed_s(block: int) -> float:
            return before_s + self.compute(front, block * question.block_tokens)

        def loaded_s(block: int) -> float:
            return self.load(block, self._cached, self._beside)

        meet = _first(front, self._cached, lambda block: computed_s(block) >= loaded_s(block))
        choices = {block: max(computed_s(block), loaded_s(block)) for block in (max(front, meet - 1), meet)}
        meet = min(choices, key=choices.__getitem__)
        # Where they meet, a step or a piece that is under way has to end first.
        margin_s = self._prefill.step_s + _MARGIN * min(computed_s(meet), loaded_s(meet))
        return meet, choices[meet] + margin_s, after_s


def _first(begin: int, end: int, holds: Callable[[int], bool]) -> int:
    """The first of [begin, end] that holds, where all behind it do; `end` if none."""
    while begin < end:
        middle = (begin + end) // 2
        if holds(middle):
            end = middle
        else:
            begin = middle + 1
    return begin
