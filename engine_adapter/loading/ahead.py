"""Loads ahead of use: the cached prefix of a request that runs soon comes from DRAM into HBM before it is scheduled.

The last leg of a prefetch. Only what is in memory as a whole is loaded, so nothing here waits for a disk, nor has one
read sooner than a deadline asks for. What is loaded is held until the request is admitted, in a part of the pages that
is let go of as soon as somebody who runs, or is to run first, lacks one; it stays cached then like any other block.
One engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import RequestId
from engine_adapter.copying.copier import Copier
from engine_adapter.loading.load import Load
from kvstore.client import Namespace, PendingGrant, Session, SlotRun
from kvstore.layout import Tier
from kvstore.moves import Outcome

__all__ = ["LoadAhead"]

_PART = 8
"""Of the pages one in so many may be held for requests that do not run."""
_LOOK_S = 0.05
"""How often it is looked where the blocks of a request are: 0.1 ms each time."""


@dataclass(slots=True)
class _Ahead:
    look_at: float = 0.0
    pages: int = 0
    grant: PendingGrant | None = None  # until it is taken
    load: Load | None = None  # until it is loaded
    slots: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    over: bool = False  # once a request: what was given back is not loaded again


class LoadAhead:
    """See the module."""

    def __init__(
        self, session: Session, namespace: Namespace, copier: Copier, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._copier = copier
        self._clock = clock
        self._by_request: dict[RequestId, _Ahead] = {}
        self._pages = 0

    @property
    def pages(self) -> int:
        """Held, or asked for."""
        return self._pages

    def begin(self, request: RequestId, lease: int, prompt: NDArray[np.uint64]) -> None:
        """The request with this lease runs soon; `prompt` ([n, 2]) are the hashes that may be hits. Never waits."""
        found = self._by_request.setdefault(request, _Ahead())
        now = self._clock()
        if found.over or found.pages or now < found.look_at or not self._session.available:
            return
        found.look_at = now + _LOOK_S
        tiers = self._session.match(self._namespace, prompt).tiers
        if not (tiers == Tier.DRAM).any() or (tiers == Tier.NVME).any():
            return
        if self._pages + len(tiers) > self._session.hbm.num_pages // _PART:
            return
        found.pages = len(tiers)
        self._pages += found.pages
        found.grant = self._session.acquire(self._namespace, lease, prompt[: len(tiers)])

    def poll(self) -> None:
        """Goes on with what has been answered."""
        for found in self._by_request.values():
            if found.grant is not None and found.grant.done():
                self._take(found)
            if (load := found.load) is not None:
                load.submit(self._copier)
                if load.failed:
                    found.over = True
                if load.loaded or load.failed:
                    found.load = None
                    if load.wrong:
                        self._let_go(found)

    def end(self, request: RequestId) -> None:
        """The request has its pages, or needs none any more."""
        found = self._by_request.pop(request, None)
        if found is not None:
            self._let_go(found)

    def yield_pages(self, asks: RequestId | None = None) -> None:
        """Somebody lacks pages: all are let go of, but those for the one who asks."""
        for request, found in self._by_request.items():
            if request != asks:
                self._let_go(found)

    def _take(self, found: _Ahead) -> None:
        assert found.grant is not None
        if found.grant.error is not None:
            self._let_go(found)
            return
        grant = found.grant.result(0)
        if not ((grant.outcomes == Outcome.HIT_HBM) | (grant.outcomes == Outcome.HIT_DRAM)).all():
            self._let_go(found)  # something left meanwhile: the request itself asks for it in time
            return
        found.grant, found.slots = None, grant.hbm_slots
        in_dram = grant.outcomes == Outcome.HIT_DRAM
        if in_dram.any():
            found.load = Load(
                self._session,
                SlotRun(slots=grant.dram_slots[in_dram], generations=grant.dram_generations[in_dram]),
                SlotRun(slots=grant.hbm_slots[in_dram], generations=grant.hbm_generations[in_dram]),
            )

    def _let_go(self, found: _Ahead) -> None:
        if found.grant is not None:
            found.grant.abandon()
        if found.load is not None:
            found.load.withdraw(self._copier)
        if len(found.slots):
            self._session.stage(dropped_hbm=found.slots)
        self._pages -= found.pages
        found.over = found.over or found.pages > 0
        found.grant, found.load, found.slots, found.pages = None, None, found.slots[:0], 0
