"""What each request of an engine is to load and to compute: from its first question until both of its ends have met.

Between the block manager, which has the requests' tables, and `LoadChoice`, which plans. A request that has nothing
below HBM costs a look at its tiers. One engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import EVERYTHING, Reach
from engine_adapter.copying.copier import Copier
from engine_adapter.loading.arrival import Arrival
from engine_adapter.loading.both_ends import BothEnds, LoadedPiece, PieceLoader
from engine_adapter.loading.choice import LoadChoice
from engine_adapter.loading.layer_groups import LayerGroups
from engine_adapter.loading.load import Load
from kvstore.client import Namespace, Session
from kvstore.layout import Tier
from kvstore.planning.planner import Plan, Way

__all__ = ["Ask", "LoadPlans", "Progress"]

_Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to acquire: so many leading blocks by name, with slots of its own for those that no memory has, or not.

    What is on its way from a disk then is waited for `wait_s`; after that it is to be asked for again.
    """

    blocks: int
    private: bool = False
    wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a request that is loaded from behind."""

    pieces: list[LoadedPiece]
    """To take into its table."""
    reach: Reach
    overtaken: list[range]
    """Blocks that need not be computed, since they are in the table as they were loaded; mostly none."""


@dataclass(slots=True)
class _Planned:
    plan: Plan
    tiers: NDArray[np.uint8]
    hashes: _Hashes  # [cached]
    asked_at: float
    disk_bytes: int  # that disks had to read first, the request's own among them; 0: none
    trial: bool  # it is only to see how fast a disk is
    both: BothEnds | None = None
    overtaken_blocks: int = 0
    alone: bool = True  # the engine has had no other request since


class LoadPlans:
    """See the module. Requests are named by their leases."""

    def __init__(
        self,
        session: Session,
        namespace: Namespace,
        copier: Copier,
        choice: LoadChoice,
        leases: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        """`leases` gives names for pieces, of which none is a request's."""
        self._session = session
        self._namespace = namespace
        self._copier = copier
        self._choice = choice
        self._leases = leases
        self._clock = clock
        self._planned: dict[int, _Planned] = {}
        self._loader = PieceLoader()

    # ------------------------------------------------------------ before it runs

    def prefetches(self, found: NDArray[np.uint8], num_tokens: int, ahead: int) -> bool:
        """Whether a request that was enqueued with its blocks in these tiers wants them fetched from disk by now.

        One that runs at once only where it will load them from their beginning; others while they wait.
        """
        if not (found == Tier.NVME).any():
            return ahead > 0 and len(found) > 0
        if not self._choice.may_prefetch:
            return False
        if ahead > 0:
            return True
        return self._choice.plan(found, num_tokens, self._namespace.block_tokens).way is Way.LOAD

    def ask(
        self, lease: int, prompt: _Hashes, num_tokens: int, computed_here: Callable[[int], bool]
    ) -> Ask | None:
        """The request with this lease is about to be admitted; `prompt` ([n, 2]) are the hashes that may be hits.

        `computed_here`: whether another request of this engine computes this block. None: it computes the first that
        this one would; ask again.
        """
        found, previous = self._session.match(self._namespace, prompt).tiers, self._planned.get(lease)
        if previous is not None:
            self._note_arrived(previous, found)
            self.end(lease)
        if not (found != Tier.HBM).any():
            return Ask(len(prompt))
        plan = self._choice.plan(found, num_tokens, self._namespace.block_tokens)
        if plan.load_end < len(found) and computed_here(plan.load_end):
            return None
        on_disk = int(np.count_nonzero(found == Tier.NVME))
        tried = self._choice.tried(plan, found) if on_disk and previous is None else None
        if tried is not None:
            plan = tried.plan
        loads = plan.load_end == len(found)
        nbytes = (
            on_disk * self._session.hbm.slot_bytes + self._choice.queued_bytes() if loads and on_disk else 0
        )
        known = found[: plan.cached_blocks] if plan.way is Way.BOTH_ENDS else found
        planned = self._planned[lease] = _Planned(
            plan, known, prompt[: len(known)], self._clock(), nbytes, tried is not None
        )
        if loads and previous is not None and previous.disk_bytes:  # it still waits, since then
            planned.asked_at, planned.disk_bytes, planned.tiers = (
                previous.asked_at,
                previous.disk_bytes,
                previous.tiers,
            )
        if loads:
            wait_s = self._choice.patience_s(plan) if tried is None else tried.wait_s
            return Ask(len(prompt), wait_s=wait_s)
        self._session.cancel(lease)  # what a prefetch of it has not read yet is not to be read from the front
        if previous is not None:
            self._choice.queue_cancelled()
        if found[plan.load_end] == Tier.DRAM:
            return Ask(plan.load_end, private=True)  # by its name it would be a hit
        return Ask(len(prompt), private=True)

    def _note_arrived(self, planned: _Planned, found: NDArray[np.uint8]) -> None:
        """How fast a disk was that a request has waited for: what came by now took as long.

        Where nothing came, all of it takes longer than that: twice as long, unless it was a trial, which may be shorter
        than the first call of a disk and says nothing.
        """
        if not planned.disk_bytes:
            return
        length = min(len(found), len(planned.tiers))
        wanted = planned.tiers[:length] == Tier.NVME
        came = int(np.count_nonzero(wanted & (found[:length] != Tier.NVME)))
        waited_s = self._clock() - planned.asked_at
        if came:
            missing = int(np.count_nonzero(wanted)) - came
            nbytes = planned.disk_bytes - missing * self._session.hbm.slot_bytes
            self._choice.loaded(Tier.NVME, nbytes, waited_s)
        elif not planned.trial:
            self._choice.loaded(Tier.NVME, planned.disk_bytes, 2.0 * waited_s)

    def begin(self, lease: int, hits: int) -> None:
        """The request has its slots, the first `hits` blocks of them are cached: what is loaded from behind begins."""
        planned = self._planned.get(lease)
        if planned is None or planned.plan.way is not Way.BOTH_ENDS or hits >= len(planned.hashes):
            return
        planned.both = BothEnds(
            self._session,
            self._copier,
            self._namespace,
            self._choice,
            planned.hashes,
            hits,
            self._leases,
            self._clock,
            waits=not planned.trial,
        )
        self._loader.add(planned.both)

    def arrival(self, rule: LayerGroups, load: Load, cached_tokens: int, num_tokens: int) -> Arrival | None:
        """Of a load that comes in groups of layers while what is not cached is computed; None: it comes whole."""
        speeds = self._choice.speeds()
        groups = rule.choose(
            blocks=len(load),
            cached_tokens=cached_tokens,
            num_tokens=num_tokens,
            prefill=speeds.prefill,
            dram=speeds.tiers.get(Tier.DRAM),
        )
        return Arrival(layers=rule.layers, groups=groups) if groups > 1 else None

    def loaded(self, load: Load) -> None:
        """What was copied for a request from DRAM is there."""
        self._choice.loaded(Tier.DRAM, load.nbytes, load.seconds)

    def admitted(self, lease: int, hits: int) -> None:
        """It runs now, with so many blocks cached."""
        planned = self._planned.get(lease)
        if planned is None:
            return
        if planned.both is None:
            self._decided(planned, hits)
            del self._planned[lease]

    # ------------------------------------------------------------ while it runs

    def progress(self, lease: int, num_tokens: int, alone: bool) -> Progress | None:
        """Of a request that has computed so many tokens, those of steps under way included; None: nothing is loaded.

        `alone`: the engine has no other.
        """
        planned = self._planned.get(lease)
        if planned is None or planned.both is None:
            return None
        planned.alone &= alone
        both, block_tokens = planned.both, self._namespace.block_tokens
        taken, here = both.take(num_tokens), -(-num_tokens // block_tokens)
        run = taken.run
        if here < run.begin or num_tokens % block_tokens:
            stop = both.stop(num_tokens) if here < run.begin else here  # the block that it is in
            reach = Reach(computed_tokens=num_tokens, stop_tokens=max(num_tokens, stop * block_tokens))
            return Progress(taken.pieces, reach, [])
        overtaken = range(here, max(here, run.end))
        planned.overtaken_blocks += len(overtaken)
        if overtaken.stop >= both.end:
            self._decided(planned, both.begin + planned.overtaken_blocks)
            if planned.alone:
                self._choice.both_took(planned.plan, self._clock() - planned.asked_at)
            self.end(lease)
        tokens = overtaken.stop * block_tokens
        stop_tokens = EVERYTHING if overtaken.stop >= both.end else tokens + block_tokens
        return Progress(taken.pieces, Reach(computed_tokens=tokens, stop_tokens=stop_tokens), [overtaken])

    def end(self, lease: int) -> None:
        """Nothing more is to be loaded for this request."""
        planned = self._planned.pop(lease, None)
        if planned is not None and planned.both is not None:
            planned.both.close()

    def _decided(self, planned: _Planned, loaded_blocks: int) -> None:
        cached = len(planned.hashes)
        loaded = min(loaded_blocks, cached)
        plan = replace(planned.plan, cached_blocks=cached, load_end=loaded, meet=cached)
        self._choice.admitted(plan, planned.tiers, self._namespace, planned.hashes[-1])
