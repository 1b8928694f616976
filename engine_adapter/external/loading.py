"""Loads of the scheduling half: from the pages that the engine took, by way of an acquire, to a job for the ranks.

An acquire may find less than the lookup did, or blocks that are on their way from a disk: then it is asked again when
the store says that something changed, until the deadline. So it is where the daemon died meanwhile and is expected
back. What has not come by then, or is gone, is named as missing, so that the engine computes from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine_adapter.external.jobs import CopyJob
from engine_adapter.external.request import LiveRequest, PendingLoad
from kvstore.client import Session
from kvstore.moves import Grant, Outcome

__all__ = ["Loading", "Starting"]

_RETRY_S = 0.05
"""After an acquire that found something on its way, unless the store says sooner that it has come."""
_NO_SLOTS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Starting:
    """A load that the ranks are told of."""

    request: LiveRequest
    job: CopyJob


class Loading:
    """Requests whose loads no rank has yet."""

    def __init__(self, numbers: Iterator[int], clock: Callable[[], float]) -> None:
        self._numbers = numbers
        self._clock = clock
        self._waiting: dict[str, LiveRequest] = {}
        self._abandoned: list[Starting] = []
        self.given_up_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._abandoned)

    def begin(self, request: LiveRequest, load: PendingLoad, session: Session | None) -> None:
        """The engine has taken pages. `session` None: the daemon is away, and is asked when it is back."""
        request.load = load
        self._waiting[request.facts.id] = request
        if session is not None:
            self._ask(session, request, load)

    def abandon(self, request: LiveRequest) -> None:
        """The request has ended: the engine keeps its pages until the load is answered, so it is answered."""
        if self._waiting.pop(request.facts.id, None) is None or request.load is None:
            return
        if request.load.grant is not None:
            request.load.grant.abandon()
        self._abandoned.append(Starting(request, self._job(request, request.load, None, 0, missing=False)))

    def give_up(self) -> None:
        """What was cached is not to be read any more: none of these loads comes."""
        for request in self._waiting.values():
            assert request.load is not None
            if request.load.grant is not None:
                request.load.grant.abandon()
            self._abandoned.append(Starting(request, self._job(request, request.load, None, 0)))
        self._waiting.clear()

    def changed(self, leases: frozenset[int]) -> None:
        """The store says that what these waited for has come or failed."""
        for request in self._waiting.values():
            if request.lease in leases and request.load is not None:
                request.load.retry_at = 0.0

    def starting(self, session: Session | None) -> list[Starting]:
        """What can be said to the ranks now. `session` None: nothing will come any more."""
        made, self._abandoned = self._abandoned, []
        for name, request in list(self._waiting.items()):
            assert request.load is not None
            job = self._advance(session, request, request.load)
            if job is not None:
                del self._waiting[name]
                made.append(Starting(request, job))
        return made

    def _advance(self, session: Session | None, request: LiveRequest, load: PendingLoad) -> CopyJob | None:
        now, grant = self._clock(), load.grant
        late = session is None or now >= load.until
        if grant is None:
            if late:
                return self._job(request, load, None, 0)
            assert session is not None
            if now >= load.retry_at:
                self._ask(session, request, load)
            return None
        if not grant.done():
            if not late:
                return None
            grant.abandon()
            return self._job(request, load, None, 0)
        if grant.error is not None:
            if late or grant.error.retry_after_s is None:
                return self._job(request, load, None, 0)
            load.grant, load.retry_at = None, now + _RETRY_S
            return None
        found = grant.result(0)
        hits = _leading_hits(found)
        if hits < len(load) and not late and self._comes(session, request, load, found, hits):
            grant.abandon()
            load.grant, load.retry_at = None, now + _RETRY_S
            return None
        return self._job(request, load, found, hits)

    @staticmethod
    def _comes(
        session: Session | None, request: LiveRequest, load: PendingLoad, found: Grant, block: int
    ) -> bool:
        """Whether a block that was not granted is on its way, or is on a disk and DRAM has no room for it just now."""
        if found.outcomes[block] >= Outcome.PROMOTING:
            return True
        assert session is not None
        assert request.chain is not None
        assert request.namespace is not None
        at = load.begin + block
        return session.match(request.namespace, request.chain.hashes[at : at + 1]).hits > 0

    def _ask(self, session: Session, request: LiveRequest, load: PendingLoad) -> None:
        """The whole chain, so that what the engine has itself is touched: the store's order must not forget it."""
        assert request.chain is not None
        assert request.namespace is not None
        hashes = request.chain.hashes[: load.begin + len(load)]
        load.grant = session.acquire(request.namespace, request.lease, hashes, first=load.begin)

    def _job(
        self, request: LiveRequest, load: PendingLoad, found: Grant | None, hits: int, *, missing: bool = True
    ) -> CopyJob:
        self.given_up_blocks += len(load) - hits if missing else 0
        return CopyJob(
            number=next(self._numbers),
            request=request.facts.id,
            pages=load.pages[:hits],
            slots=_NO_SLOTS if found is None else found.dram_slots[:hits],
            generations=_NO_SLOTS if found is None else found.dram_generations[:hits],
            missing=tuple(load.pages[hits:, 0].tolist()) if missing else (),
        )


def _leading_hits(grant: Grant) -> int:
    hit = grant.outcomes == Outcome.HIT_DRAM
    return len(hit) if hit.all() else int(hit.argmin())
