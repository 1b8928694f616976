"""The scheduling process's half: looks prompts up, acquires what is to be loaded, seals what was stored.

A request as it comes by here:

    new → matched (any number of times, without an effect) → allocated → [loading] → steps → ended
          ↑ a preempted request is matched and allocated again

A lookup is answered from the tables that are mapped here, or by "ask again" while what would make it a hit is known to
be on its way: a daemon that died a moment ago, where the tables it left have the prompt; a namespace that is being
opened; disks that a new daemon has not read; blocks that are being read from one. Each request has one patience for
all of these (`lookup_s`); the engine's other requests go on meanwhile. Where no daemon ever was, or one is away for
long, nobody waits.

The acquire goes out once the engine has taken pages for the request, so what a lookup promised may be gone by then:
such a load is given up, and the engine computes. While a daemon that died is expected back its loads wait for it. Of a
running request each full block of confirmed tokens is stored once, as far as DRAM slots are in hand; for what has none
it is tried again at a later step. Nothing here waits, and a step with nothing to do sends nothing.

One thread, the engine's scheduler. Times are in seconds of `clock`.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from engine_adapter.base import Ending
from engine_adapter.endings import say_ended
from engine_adapter.external.chain import RequestChain
from engine_adapter.external.jobs import CopyJob, StepPlan, StepReport
from engine_adapter.external.link import Identity
from engine_adapter.external.loading import Loading
from engine_adapter.external.request import BlockIds, LiveRequest, PendingLoad, RequestFacts, page_table
from engine_adapter.external.storing import Storing
from kvstore.cache_use import Access
from kvstore.client import Changed, Lost, Namespace, Session
from kvstore.client.descriptors import MappedMemory
from kvstore.layout import NONE, Tier
from kvstore.match import MatchResult

__all__ = ["Link", "Scheduling", "SchedulingRules", "SchedulingStats"]

_SETTLE_S = 0.05
"""How long after a prefetch was sent its effect may not show in the tables yet."""
_BREATH_S = 0.0003
_LOOK_AGAIN_S = 0.005
"""Engines ask for every waiting request at every step, and there may be hundreds."""
_MAX_EVENTS = 4096


class Link(Protocol):
    """What of `StoreLink` is needed here."""

    @property
    def session(self) -> Session | None:
        """While the daemon answers."""
        ...

    @property
    def attached(self) -> Session | None:
        """Also while it is away."""
        ...

    def namespace(self, identity: Identity) -> Namespace | None:
        """Where it is open."""
        ...

    def coming(self, identity: Identity) -> bool:
        """Whether it is worth waiting for."""
        ...

    @property
    def expected(self) -> Session | None:
        """As `session`, and also while the daemon is expected back."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the daemon knows what its disks hold."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """`ranks` copy each job. `lookup_s`: how long a request's lookups may ask for patience; `load_s`: how long a load
    may take to begin. `promise_disk`: whether a lookup counts blocks that only a disk has and nobody reads yet; where
    the engine fails a request whose load fails, it must not."""

    block_tokens: int
    ranks: int
    lookup_s: float = 2.0
    load_s: float = 10.0
    promise_disk: bool = True
    pages_go_early: bool = False
    """Whether the engine takes pages from a running request (sliding windows): then stores end before the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingStats:
    """Counts since the start."""

    loaded_blocks: int
    stored_blocks: int
    given_up_blocks: int  # promised by a lookup, and not there when they were to be loaded
    requests: int  # now


@dataclass(slots=True)
class _Copying:
    """A job that ranks have."""

    left: int
    request: LiveRequest
    job: CopyJob
    failed: bool = False


class Scheduling:
    """See the module."""

    def __init__(
        self, link: Link, rules: SchedulingRules, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = link
        self._rules = rules
        self._clock = clock
        numbers, self._leases = count(1), count(1)
        self._breath_at = 0.0
        self._requests: dict[str, LiveRequest] = {}
        self._copying: dict[int, _Copying] = {}
        self._loading = Loading(numbers, clock)
        self._storing = Storing(numbers)
        self._late_stores: list[CopyJob] = []
        self._held: dict[str, tuple[int, ...]] = {}
        self._last_stores: tuple[int, ...] = ()
        self._epoch = ""
        self._events: deque[object] = deque(maxlen=_MAX_EVENTS)
        self._loaded_blocks = 0
        self._tables: MappedMemory | None = None  # those of the last lookup that the daemon was there for

    # ------------------------------------------------------------ waiting requests

    def new(self, facts: RequestFacts) -> None:
        """The engine has queued a request: what only a disk has of it is read ahead."""
        request = LiveRequest(
            facts=replace(facts, identity=self._now(facts.identity)), lease=next(self._leases)
        )
        self._requests[facts.id] = request
        session = self._link.session
        if session is not None and self._chain_of(request) is not None:
            self._ask_ahead(session, request)

    def matched(self, name: str, num_tokens: int, local_tokens: int) -> int | None:
        """Tokens beyond the engine's own `local_tokens` (whole blocks) that can be loaded; None: ask again soon.

        One token of the request's `num_tokens` is always left to compute.
        """
        request = self._requests.get(name)
        if request is None or request.barred or request.given_up:
            return 0
        request.local_blocks = local_tokens // self._rules.block_tokens
        most = (num_tokens - 1) // self._rules.block_tokens
        if most <= request.local_blocks:
            return 0
        if self._clock() < request.quiet_until:
            self._breathe()
            return None
        hits = self._lookup(request, most)
        if hits is None:
            request.quiet_until = self._clock() + _LOOK_AGAIN_S
            self._breathe()
            return None
        return hits * self._rules.block_tokens

    def _breathe(self) -> None:
        """Lets the threads that bring what is waited for have the interpreter, for less than a millisecond.

        An engine that has nothing else to run asks, or steps, again at once: vLLM kept a namespace from being opened
        for 2 s.
        """
        if self._clock() >= self._breath_at:
            time.sleep(_BREATH_S)
            self._breath_at = self._clock() + _BREATH_S

    def _lookup(self, request: LiveRequest, most: int) -> int | None:
        """Of `most` blocks those beyond the engine's own that a load may count on; None while that is not known."""
        session = self._link.expected
        if session is None or not session.use.access & Access.READS:
            return 0
        chain = self._chain_of(request)
        if chain is None:
            return None if self._link.coming(request.facts.identity) and self._patient(request) else 0
        assert request.namespace is not None
        self._extend(request, chain)
        if not session.may(request.namespace) & Access.READS:
            return 0
        most = min(most, session.max_message_blocks)
        if most <= request.local_blocks:
            return 0
        found = session.match(request.namespace, chain.hashes[request.local_blocks : most])
        if not session.connected or not session.available:
            # What it had when it went it will have when it is back, unless the tables are a new daemon's already.
            hopeless = not found.hits and session.tables is self._tables
            return None if not hopeless and self._patient(request) else 0
        self._tables = session.tables
        complete = found.hits == most - request.local_blocks and bool((found.tiers == Tier.DRAM).all())
        if not complete and not self._link.settled and self._patient(request):
            return None
        if request.asked_stream != session.streams:
            self._ask_ahead(session, request)
        return self._loadable(session, request, found)

    def allocated(self, name: str, block_ids: BlockIds, external_tokens: int) -> None:
        """The engine took pages for what `matched` said last, `external_tokens` of it to be loaded (0: nothing is)."""
        request, session = self._requests.get(name), self._link.session
        if request is None:
            return
        first_time, request.started = not request.started, True
        if external_tokens:
            begin = request.local_blocks
            pages = page_table(block_ids, begin, begin + external_tokens // self._rules.block_tokens)
            load = PendingLoad(begin=begin, pages=pages, until=self._clock() + self._rules.load_s)
            self._loading.begin(request, load, session)  # away: it is asked for when the daemon is back
        elif session is not None and request.load is None:
            self._touch(session, request)
            if first_time:
                self._count(session, request)

    def had(self, name: str, tokens: int) -> None:
        """For engines that do not ask `matched`: so many leading tokens of a request they have themselves."""
        request = self._requests.get(name)
        if request is not None:
            request.local_blocks = tokens // self._rules.block_tokens

    def sources(self, name: str, external_tokens: int) -> tuple[int, int]:
        """Of the tokens to be loaded, how many came from DRAM and how many from a disk, also by being read ahead."""
        request = self._requests.get(name)
        if request is None:
            return external_tokens, 0
        from_disk = min(external_tokens, request.on_disk * self._rules.block_tokens)
        return external_tokens - from_disk, from_disk

    # ------------------------------------------------------------ steps

    def plan(
        self,
        computed: Iterable[tuple[str, int]],
        preempted: Iterable[str],
        block_ids_of: Callable[[str], BlockIds | None],
    ) -> StepPlan:
        """What the ranks are to do with this step.

        `computed`: requests in it, each with the number of its leading tokens whose KV is in its pages after it.
        """
        session, scheduled = self._link.attached, tuple(computed)
        before = self._preempted(preempted) if preempted else ()
        if session is None:
            return StepPlan(before_step=before)
        self._absorb_events(session)
        stores, self._late_stores = self._late_stores, []
        expected = self._link.expected
        if expected is not None:  # slots in hand can be filled while the daemon is away
            stores += self._stores(expected, scheduled, block_ids_of)
        starting = self._loading.starting(expected) if self._loading else []
        for load in starting:
            self._copying[load.job.number] = _Copying(self._rules.ranks, load.request, load.job)
        if self._loading and not scheduled:
            self._breathe()
        held, self._held = self._held, {}
        if self._rules.pages_go_early:
            before, self._last_stores = before + self._last_stores, tuple(job.number for job in stores)
        if starting or stores:
            session.step()
        return StepPlan(
            loads=tuple(load.job for load in starting), stores=tuple(stores), before_step=before, held=held
        )

    def report(self, report: StepReport) -> None:
        """What ranks have ended since the last report."""
        session = self._link.attached
        if session is None or not report.done:
            return
        for number, ranks in report.done.items():
            copying = self._copying.get(number)
            if copying is None:
                continue
            copying.left -= ranks
            copying.failed |= number in report.failed
            if copying.left <= 0:
                del self._copying[number]
                self._ended(session, copying)
        session.step()

    def ended(
        self, name: str, block_ids: BlockIds, computed_tokens: int, ending: Ending | None = None
    ) -> bool:
        """The request has finished or was aborted. True: its pages are still being read, and it will be named as sent.

        `computed_tokens`: of its leading tokens, those whose KV is, or will be by the next step, in its pages.
        `ending`: how its answer ended by itself; None: it did not, or nobody knows.
        """
        request = self._requests.pop(name, None)
        if request is None:
            return False
        attached = self._link.attached
        if ending is not None and attached is not None and request.chain is not None and not request.barred:
            assert request.namespace is not None
            say_ended(attached, request.namespace, request.chain.hashes, ending)
        if request.load is not None:
            self._loading.abandon(request)
        if attached is not None and (request.load is not None or not request.started):
            attached.cancel(request.lease)
        if request.load is not None:
            return False  # the load's own end lets the pages go
        session = self._link.expected
        if session is not None and block_ids:
            self._late_stores += self._stores(
                session, [(name, computed_tokens)], lambda _: block_ids, request
            )
        if request.stores:
            self._held[name] = tuple(request.stores)
        return bool(request.stores)

    def reset(self) -> None:
        """Weights have changed, or all that is cached is to be forgotten: nothing from before is read or stored."""
        self._epoch = secrets.token_hex(16)
        self._loading.give_up()
        for request in self._requests.values():
            request.barred |= request.started
            request.chain = request.namespace = None
            request.facts = replace(request.facts, identity=self._now(request.facts.identity))

    @property
    def busy(self) -> bool:
        """Whether there are jobs whose end has to be heard, or something to be said to the ranks."""
        return bool(self._copying or self._late_stores or self._held or self._loading)

    def take_events(self) -> list[object]:
        """The engine's own events for blocks that were stored since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def stats(self) -> SchedulingStats:
        """Counters now."""
        return SchedulingStats(
            loaded_blocks=self._loaded_blocks,
            stored_blocks=self._storing.stored_blocks,
            given_up_blocks=self._loading.given_up_blocks,
            requests=len(self._requests),
        )

    # ------------------------------------------------------------ parts

    def _now(self, identity: Identity) -> Identity:
        return replace(identity, epoch=self._epoch)

    def _patient(self, request: LiveRequest) -> bool:
        now = self._clock()
        if not request.patience_until:
            request.patience_until = now + self._rules.lookup_s
        return now < request.patience_until

    def _chain_of(self, request: LiveRequest) -> RequestChain | None:
        if request.chain is not None and not request.chain.current:
            request.chain = None
        if request.chain is None:
            request.namespace = self._link.namespace(request.facts.identity)
            if request.namespace is not None:
                request.chain = RequestChain(
                    request.namespace, request.facts.token_ids[:], request.facts.items
                )
        return request.chain

    @staticmethod
    def _extend(request: LiveRequest, chain: RequestChain) -> None:
        """By the tokens that have been confirmed since."""
        if len(request.facts.token_ids) > chain.num_tokens:
            chain.extend(request.facts.token_ids[chain.num_tokens :])

    def _ask_ahead(self, session: Session, request: LiveRequest) -> None:
        """Touches what is cached of a prompt, and has what only a disk has read."""
        assert request.chain is not None
        assert request.namespace is not None
        hashes = request.chain.hashes[: session.max_message_blocks]
        if not len(hashes) or not session.may(request.namespace) & Access.READS:
            return
        request.on_disk = int((session.match(request.namespace, hashes).tiers == Tier.NVME).sum())
        request.asked_ahead_at = self._clock()
        request.asked_stream = (
            session.streams if self._link.settled else 0
        )  # else it may have found nothing to read
        session.prefetch(request.namespace, request.lease, hashes)

    def _loadable(self, session: Session, request: LiveRequest, found: MatchResult) -> int | None:
        """Leading blocks of a run that a load may count on; None while some of them are being read from a disk."""
        on_disk = np.flatnonzero(found.tiers == Tier.NVME)
        if not len(on_disk):
            return found.hits
        if not self._patient(request):
            return int(on_disk[0])
        coming = session.tables.tables.columns.dram[found.rows[on_disk]] != NONE
        if coming.any() or self._clock() < request.asked_ahead_at + _SETTLE_S:
            return None
        return found.hits if self._rules.promise_disk else int(on_disk[0])

    def _touch(self, session: Session, request: LiveRequest) -> None:
        """The engine has a prefix of its own: the store is told that it is in use, or it would go there first."""
        if request.chain is None or request.namespace is None:
            return
        hashes = request.chain.hashes[: min(request.local_blocks, session.max_message_blocks)]
        if len(hashes) and session.may(request.namespace):
            session.acquire(request.namespace, request.lease, hashes, first=len(hashes))

    def _count(self, session: Session, request: LiveRequest) -> None:
        """A dry run: the store counts what a lookup would have hit. It gives nothing, and nothing comes of it."""
        if request.chain is None or request.namespace is None:
            return
        may = session.may(request.namespace)
        most = (len(request.facts.token_ids) - 1) // self._rules.block_tokens
        hashes = request.chain.hashes[: min(most, session.max_message_blocks)]
        if may & Access.COUNTS and not may & Access.READS and len(hashes) > request.local_blocks:
            session.acquire(request.namespace, request.lease, hashes, first=request.local_blocks)

    def _absorb_events(self, session: Session) -> None:
        for event in session.poll():
            if isinstance(event, Changed):
                self._loading.changed(frozenset(event.leases))
            elif isinstance(event, Lost):
                for request in self._requests.values():
                    request.stored_blocks = 0  # what is still there is passed over

    def _stores(
        self,
        session: Session,
        computed: Iterable[tuple[str, int]],
        block_ids_of: Callable[[str], BlockIds | None],
        ended: LiveRequest | None = None,
    ) -> list[CopyJob]:
        jobs = []
        for name, tokens in computed:
            request = ended or self._requests.get(name)
            if request is None or request.barred:
                continue
            full = min(tokens, len(request.facts.token_ids)) // self._rules.block_tokens
            if full <= request.stored_blocks or full > session.max_message_blocks:
                continue
            chain = self._chain_of(request)
            block_ids = block_ids_of(name) if chain is not None else None
            if chain is None or block_ids is None or request.namespace is None:
                continue
            if not session.may(request.namespace) & Access.WRITES:
                continue
            self._extend(request, chain)
            job = self._storing.job(session, request, full, block_ids)
            if job is not None:
                self._copying[job.number] = _Copying(self._rules.ranks, request, job)
                jobs.append(job)
        return jobs

    def _preempted(self, names: Iterable[str]) -> tuple[int, ...]:
        """Its pages are overwritten from the next step on, and the engine computes or loads it again."""
        jobs: list[int] = []
        for name in names:
            request = self._requests.get(name)
            if request is not None:
                jobs += request.stores
                request.stores = set()
                request.stored_blocks = request.local_blocks = 0
                request.patience_until = 0.0
        return tuple(jobs)

    def _ended(self, session: Session, copying: _Copying) -> None:
        job, request = copying.job, copying.request
        if job.number in self._storing:
            stored = self._storing.ended(session, job.number, failed=copying.failed)
            request.stores.discard(job.number)
            if stored.event is not None and not copying.failed:
                self._events.append(stored.event)
            return
        session.stage(dropped_dram=job.slots)
        request.load = None
        request.given_up |= copying.failed or bool(job.missing)
        self._loaded_blocks += 0 if copying.failed else len(job.slots)
