"""Load or recompute, for one engine: measures, plans, keeps watch over tiers that harm, and says what it did.

The shell around `kvstore.planning.planner`, `speeds` and `guard`: it has the clock and the session. Two tiers
are watched. `dram` is what is copied out of HBM: spent is the copying, saved is what loads from DRAM and from the disk,
which is fed from there, gained. `nvme` is what is loaded from disk: it is worth its while where it saves a few percent
of what computing the same would take. One engine thread; measurements come from the copier's and the loader's, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine_adapter.loading.trials import Trial, Trials
from kvstore.client import Decision, Namespace, Session, TierChange
from kvstore.layout import MOVER_BIT, ExtentState, SlotState, Tier, states
from kvstore.planning.guard import GuardLimits, TierGuard, Use, Verdict
from kvstore.planning.meeting import Meeting, piece_blocks
from kvstore.planning.planner import Ends, Plan, Question, Way, plan_request, segments_of
from kvstore.planning.speeds import PrefillSpeed, SpeedMeter, Speeds, TierSpeed

__all__ = ["ChoiceSettings", "LoadChoice", "LoadMode", "Tried"]

_LOG = logging.getLogger("kvstore.planning.planner")
_DISK_WINDOW = 16
"""Requests that found something on disk, between two verdicts on it."""
_WORTH_SHARE = 0.03
"""Of what computing would take, the least that asking a disk has to save."""
_LEAST_STORED_BYTES = 8 << 20
_QUEUE_AGE_S = 0.01
_SETTLE_S = 0.05
"""How often it is looked whether a tier is to go out of use, or to come back: not at every step."""
_TRIAL_SHARE, _TRIAL_S = 0.04, 0.001
_SURPRISING = 2.0
"""Times as fast as a disk was taken for."""
_LATE, _LATE_S, _MOST_PATIENCE_S = 1.5, 0.01, 5.0


class LoadMode(StrEnum):
    """What a worker does with what is cached below HBM."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSettings:
    """Of one engine. `attention`: see `SpeedMeter`."""

    mode: LoadMode = LoadMode.AUTO
    ends: Ends = Ends.FRONT
    chunk_tokens: int = 512
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class Tried:
    """A request that tries a disk: what it does, and for how long it waits for the disk by itself; 0: beside."""

    plan: Plan
    wait_s: float


class LoadChoice:
    """See the module."""

    def __init__(
        self, session: Session, settings: ChoiceSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._settings = settings
        self._clock = clock
        self._meter = SpeedMeter(attention=settings.attention)
        dram_bytes = max(self._dram_bytes(), _LEAST_STORED_BYTES)
        self._lock = threading.Lock()  # of the meter, and of the next two
        self._stores = TierGuard(GuardLimits(window=dram_bytes, filling=dram_bytes))
        self._stored_at = 0.0
        self._computes = False  # whether a step was measured
        self._disk = TierGuard(GuardLimits(window=_DISK_WINDOW, filling=0))
        self._trials = Trials()
        self._queue = (0, -_QUEUE_AGE_S)  # bytes, when they were counted
        self._settled_at = -_SETTLE_S

    # ------------------------------------------------------------ what was measured

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed these spans of tokens [begin, end) of prompts."""
        self._computes = True
        tokens = sum(end - begin for begin, end in spans)
        context = sum(0.5 * (end * end - begin * begin) for begin, end in spans)
        with self._lock:
            self._meter.computed(tokens, context, seconds)

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """A load took so long; what was queued ahead of it is among the bytes."""
        with self._lock:
            known = self._meter.speeds().tiers.get(tier)
            self._meter.loaded(tier, nbytes, seconds)
        if tier is Tier.NVME:
            self._measured(Trial.ALONE, known, nbytes, seconds)

    def loaded_beside(self, nbytes: int, seconds: float) -> None:
        """As `loaded`, from a disk while this engine computed. Any thread."""
        with self._lock:
            known = self._meter.speeds().behind
            self._meter.loaded_beside(nbytes, seconds)
        self._measured(Trial.BESIDE, known, nbytes, seconds)

    def _measured(self, how: Trial, known: TierSpeed | None, nbytes: int, seconds: float) -> None:
        surprising = known is not None and seconds * _SURPRISING < known.seconds(nbytes)
        self._trials.measured(how, self._clock(), surprising=surprising)

    def not_loaded_beside(self, nbytes: int, seconds: float) -> None:
        """A load as in `loaded_beside` has not come for so long, and is not waited for any more. Any thread."""
        with self._lock:
            known = self._meter.speeds().behind
            self._meter.not_loaded_beside(nbytes, seconds)
        if known is not None and seconds > known.seconds(nbytes):  # else it says nothing
            self._measured(Trial.BESIDE, known, nbytes, seconds)

    def both_took(self, plan: Plan, seconds: float) -> None:
        """Both ends of a request that this engine had nothing beside have met after so long."""
        with self._lock:
            self._meter.both_took(plan.meet_s, seconds)

    def stored(self, nbytes: int, began_at: float) -> None:
        """A copy of so many bytes to DRAM has ended, that was handed to the copier then."""
        now = self._clock()
        with self._lock:
            busy_s = max(0.0, now - max(began_at, self._stored_at))
            self._stored_at = now
            if self._computes:  # else nobody knows what loads save
                self._stores.spent(busy_s, nbytes)

    def speeds(self) -> Speeds:
        """What is known now."""
        return self._meter.speeds()

    def tier_speed(self, tier: Tier) -> TierSpeed | None:
        """None: nothing was loaded from it yet."""
        return self._speeds().tiers.get(tier)

    # ------------------------------------------------------------ plans

    @property
    def may_store(self) -> bool:
        """Whether blocks are to be copied to DRAM. Any thread."""
        return self._stores.use is not Use.OUT

    @property
    def may_prefetch(self) -> bool:
        """Whether a disk is asked ahead of use."""
        return self._settings.mode is LoadMode.ALWAYS or (
            self._settings.mode is LoadMode.AUTO and self._disk.use is Use.IN_USE
        )

    def plan(self, tiers: NDArray[np.uint8], num_tokens: int, block_tokens: int) -> Plan:
        """For a request of so many tokens, whose leading blocks are in these tiers [n]."""
        settings = self._settings
        if settings.mode is LoadMode.AUTO:
            tiers = self._in_use(tiers)
        question = Question(
            num_tokens=num_tokens,
            block_tokens=block_tokens,
            slot_bytes=self._session.hbm.slot_bytes,
            segments=segments_of(tiers),
            chunk_tokens=settings.chunk_tokens,
            ends=settings.ends,
            queued_bytes={Tier.NVME: self.queued_bytes()} if (tiers == Tier.NVME).any() else {},
        )
        speeds = self._speeds()
        plan = plan_request(question, speeds)
        if settings.mode is LoadMode.AUTO:
            return plan
        cached = plan.cached_blocks
        in_hbm = int((tiers != Tier.HBM).argmax()) if (tiers != Tier.HBM).any() else cached
        if settings.mode is LoadMode.ALWAYS or in_hbm == cached:
            return replace(plan, way=Way.LOAD, load_end=cached, meet=cached)
        return replace(plan, way=Way.COMPUTE, load_end=in_hbm, meet=cached)

    def piece_blocks(self, blocks: int) -> int:
        """See `kvstore.planning.meeting`. Any thread."""
        return piece_blocks(blocks, self._session.hbm.slot_bytes, self._speeds().behind)

    def stop(self, meeting: Meeting, tokens: int, now: float, block_tokens: int, *, waits: bool) -> int:
        """Where the next step of a request that is loaded from behind should end. `waits`: whether it may wait."""
        slot_bytes = self._session.hbm.slot_bytes
        return meeting.stop(tokens, now, block_tokens, slot_bytes, self._both_speeds(), waits=waits)

    def _both_speeds(self) -> tuple[PrefillSpeed | None, TierSpeed | None]:
        speeds = self._speeds()
        return speeds.prefill, speeds.behind

    def _speeds(self) -> Speeds:
        with self._lock:
            return self._meter.speeds()

    def _in_use(self, tiers: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The leading blocks of tiers that are in use."""
        if self._disk.use is not Use.OUT:
            return tiers
        on_disk = tiers == Tier.NVME
        return tiers[: int(on_disk.argmax())] if on_disk.any() else tiers

    def tried(self, plan: Plan, tiers: NDArray[np.uint8]) -> Tried | None:
        """What a request does instead that has blocks on disk and is to try how fast that is; None: what was planned.

        See `Trials`. Waiting for the disk by itself stays within the promise.
        """
        if self._settings.mode is not LoadMode.AUTO or self._disk.use is Use.OUT:
            return None
        beside = plan.way is Way.COMPUTE and self._settings.ends is Ends.BOTH
        how = self._trials.begin(plan, beside=beside, now_s=self._clock())
        if how is Trial.BESIDE:
            return Tried(replace(plan, way=Way.BOTH_ENDS), 0.0)
        if how is Trial.ALONE:
            cached = len(tiers)
            plan = replace(plan, way=Way.LOAD, cached_blocks=cached, load_end=cached, meet=cached)
            return Tried(plan, _TRIAL_SHARE * plan.compute_all_s + _TRIAL_S)
        return None

    def patience_s(self, plan: Plan) -> float:
        """How long a load from disk may take before it is planned anew."""
        return _LATE * plan.load_all_s + _LATE_S if plan.expected_s else _MOST_PATIENCE_S

    def queued_bytes(self) -> int:
        """What disks have to read first, for whomever: DRAM slots that are being filled by a mover. O(DRAM slots)."""
        now = self._clock()
        queued, counted_at = self._queue
        if now - counted_at < _QUEUE_AGE_S:
            return queued
        pool = self._session.tables.tables.columns.pool(Tier.DRAM)
        reading = (pool.holders >= np.uint64(1 << MOVER_BIT)) & (states(pool.state) == SlotState.FILLING)
        queued = int(np.count_nonzero(reading)) * self._session.hbm.slot_bytes
        self._queue = (queued, now)
        return queued

    def queue_cancelled(self) -> None:
        """What this engine itself had queued is not going to be read: not counted until the daemon has heard of it."""
        self._queue = (0, self._clock())

    # ------------------------------------------------------------ what came of it

    def admitted(
        self, plan: Plan, tiers: NDArray[np.uint8], namespace: Namespace, last: NDArray[np.uint64]
    ) -> None:
        """A request begins by this plan; `last` [2] is the hash of the last block that was cached for it."""
        below = bool((tiers != Tier.HBM).any())
        if not below:
            return
        saved_s = max(0.0, plan.compute_all_s - plan.expected_s)
        with self._lock:
            self._stores.saved(saved_s)
            if plan.way is not Way.BOTH_ENDS:
                self._meter.other_way()
        if (tiers == Tier.NVME).any() and self._disk.use is not Use.OUT:
            self._disk.spent(_WORTH_SHARE * plan.compute_all_s, 1)
            self._disk.saved(saved_s)
        speed = self.tier_speed(Tier(int(tiers.max())))
        self._session.decided(
            Decision(
                namespace=namespace.handle,
                block=last.tobytes(),
                way=plan.way,
                cached_blocks=plan.cached_blocks,
                loaded_blocks=plan.loaded_blocks,
                tier=Tier(int(tiers.max())),
                bytes_per_s=0.0 if speed is None else speed.bytes_per_s,
                expected_s=plan.expected_s,
                load_all_s=plan.load_all_s,
                compute_all_s=plan.compute_all_s,
            )
        )

    def settle(self) -> None:
        """Now and then: takes tiers out of use that harm, and tries them again."""
        now = self._clock()
        if now - self._settled_at < _SETTLE_S or self._settings.mode is not LoadMode.AUTO:
            return
        self._settled_at = now
        with self._lock:
            stores = self._stores.settle(now)
        for tier, verdict in ((Tier.DRAM, stores), (Tier.NVME, self._disk.settle(now))):
            if verdict is not None:
                self._say(tier, verdict)
                if tier is Tier.NVME and verdict.use is Use.TRIAL:
                    self._trials.soon()

    def _say(self, tier: Tier, verdict: Verdict) -> None:
        name = tier.name.lower()
        if verdict.use is Use.OUT:
            _LOG.warning(
                "%s is out of use for %.0f s: of late it cost %.2f s and saved %.2f s",
                name,
                verdict.pause_s,
                verdict.spent_s,
                verdict.saved_s,
            )
        else:
            _LOG.info("%s is %s", name, "on trial" if verdict.use is Use.TRIAL else "in use again")
        self._session.decided(
            TierChange(
                tier=tier,
                use=verdict.use,
                spent_s=verdict.spent_s,
                saved_s=verdict.saved_s,
                pause_s=verdict.pause_s,
            )
        )

    def _dram_bytes(self) -> int:
        columns = self._session.tables.tables.columns
        there = (columns.extent_tier == Tier.DRAM) & (columns.extent_state != ExtentState.FREE)
        return int(columns.extent_bytes[there].sum())
