"""The block manager of an engine whose KV is kept by kvstore: `engine_adapter.base.BlockManager` over one session.

Five minutes' reading. A request waits (QUEUED), has asked (ASKED), is being copied in (LOADING) or runs (ADMITTED). Its
block table is a row of HBM slots: first the leading cached blocks, then slots to fill. `admit` moves it on by what has
arrived since and never waits; an answer that holds some blocks but not all is given back at once, so that requests
which wait hinder nobody. Decoding takes pages from the session's credit: no answer is awaited in a step. A block is
sealed once its tokens are final and its kernels are done, under the hash of all tokens up to its end.

One engine thread. The session's and the copier's threads come in only through `Load.loaded` and `WriteThrough`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import EVERYTHING, Admission, Ending, Pages, Reach, RequestId
from engine_adapter.blocks.absence import Absence
from engine_adapter.blocks.admissions import admission
from engine_adapter.blocks.adoption import Adoption
from engine_adapter.blocks.entry import MAX_UNUSED_S, NO_PAGES, NO_SLOTS, Entry, Phase
from engine_adapter.blocks.patience import Patience
from engine_adapter.blocks.seals import seals
from engine_adapter.blocks.telling import Telling
from engine_adapter.blocks.unasked import Unasked
from engine_adapter.blocks.write_through import WriteThrough
from engine_adapter.blocks.wrong_blocks import WrongBlocks
from engine_adapter.copying.copier import Copier
from engine_adapter.endings import say_ended
from engine_adapter.loading.ahead import LoadAhead
from engine_adapter.loading.arrival import Arrival
from engine_adapter.loading.choice import ChoiceSettings, LoadChoice
from engine_adapter.loading.layer_groups import LayerGroups
from engine_adapter.loading.load import Load
from engine_adapter.loading.pace import Pace
from engine_adapter.loading.plans import LoadPlans
from kvstore.client import Changed, Lost, Namespace, Session, SlotRun
from kvstore.errors import Unavailable
from kvstore.moves import Grant, Outcome

__all__ = ["KvstoreBlockManager"]

_U32 = NDArray[np.uint32]
_RETRY_S = 0.02
"""After an answer that was short of slots: ask again no sooner, unless the store says that something changed."""


class KvstoreBlockManager:
    """See the module and `engine_adapter.base.BlockManager`."""

    def __init__(
        self,
        session: Session,
        parts: Mapping[str, bytes],
        copier: Copier,
        *,
        patience_s: float = 5.0,
        away_s: float = 30.0,
        loads: ChoiceSettings | None = None,
        layer_groups: LayerGroups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parts`: what makes this engine's KV interchangeable (kvstore/identity.py). Caller closes session and copier.

        `patience_s`: how long a request waits for blocks that other processes compute or load while none arrives. For
        those that a request of this engine computes it waits however long that takes: this engine is alive.

        `away_s`: once the daemon has been away for so long, a request that needs more than the slots in hand fails.
        `loads`: how it is decided what is loaded and what computed; None: as for an engine that can do one at a time.
        `layer_groups`: when a request is admitted while its prefix is still being loaded; None: never.
        """
        self._session = session
        self._copier = copier
        self._away_s = away_s
        self.layer_groups = layer_groups
        self._absence = Absence(clock)
        self._clock = clock
        self._namespace: Namespace = session.open_namespace(parts)
        self._requests: dict[RequestId, Entry] = {}
        self._by_lease: dict[int, Entry] = {}
        self._patience = Patience(session, self._namespace, self._requests, patience_s, clock)
        self._unasked = Unasked(self._requests, clock)
        self._leases = count(1)
        self._num_admitted = 0
        self._pace = Pace()
        self._telling = Telling(clock)
        self._wrong = WrongBlocks(session)
        self._ahead = LoadAhead(session, self._namespace, copier, clock)
        self._choice = LoadChoice(session, loads or ChoiceSettings(), clock)
        self._plans = LoadPlans(session, self._namespace, copier, self._choice, self._leases, clock)
        bound = max(64, session.hbm.num_pages // 4)
        self.write_through = WriteThrough(session, copier, max_backlog_blocks=bound, watch=self._choice)
        session.listen(self.write_through)
        self.adoption = Adoption(session, self._namespace, self.write_through, next(self._leases))

    @property
    def block_tokens(self) -> int:
        """See BlockManager."""
        return self._namespace.block_tokens

    def kv_pages(self) -> Pages:
        """See BlockManager."""
        hbm = self._session.hbm
        return Pages(
            address=hbm.base,
            count=hbm.num_pages_reserved,
            page_bytes=hbm.slot_bytes,
            device=hbm.device,
            owner=hbm,
        )

    def slots_of(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] the store's numbers of pages, the same in every process of a group."""
        return self._session.hbm.slot_of(pages).view(np.int32)

    # ------------------------------------------------------------ waiting requests

    def enqueue(
        self, request: RequestId, token_ids: Sequence[int] | NDArray[np.uint32], *, ahead: int = 0
    ) -> None:
        """See BlockManager. The store is told where it has something for the request, so that it stays or comes up."""
        chain = self._namespace.chain(token_ids)
        cap_blocks = min((len(token_ids) - 1) // self.block_tokens, self._session.max_message_blocks)
        prompt = chain.hashes[:cap_blocks]
        entry = Entry(
            lease=next(self._leases),
            chain=chain,
            cap_blocks=cap_blocks,
            found=self._session.match(self._namespace, prompt).tiers,
        )
        self._requests[request] = self._by_lease[entry.lease] = entry
        if self._plans.prefetches(entry.found, len(token_ids), ahead):
            entry.due_at = self._pace.expect(self._clock(), ahead)
            self._announce(entry)

    def _announce(self, entry: Entry) -> None:
        in_ms = max(1, int((entry.due_at - self._clock()) * 1000))
        prompt = entry.chain.hashes[: entry.cap_blocks]
        self._session.prefetch(self._namespace, entry.lease, prompt, deadline_ms=in_ms)

    def prepare(self, request: RequestId) -> None:
        """See BlockManager."""
        entry = self._requests[request]
        if entry.phase is Phase.QUEUED:
            self._ahead.begin(request, entry.lease, entry.chain.hashes[: entry.cap_blocks])

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        """See BlockManager."""
        self._absorb_events()
        entry = self._requests[request]
        entry.asked_at = self._clock()
        if entry.phase is Phase.QUEUED:
            self._ask(entry, num_tokens)
        elif entry.phase is Phase.ASKED:
            self._take_answer(entry, num_tokens)
        if entry.phase is Phase.LOADING:
            self._finish_load(entry, num_tokens)
        if entry.phase is not Phase.ADMITTED:
            return None
        self._ahead.end(request)
        return entry.admission

    def _ask(self, entry: Entry, num_tokens: int) -> None:
        now = self._clock()
        if now < entry.retry_at:
            return
        prompt = entry.chain.hashes[: entry.cap_blocks]
        self._patience.renew(entry, prompt)
        entry.turn_at = entry.turn_at or now
        ask = self._plans.ask(
            entry.lease, prompt, num_tokens, functools.partial(self._patience.computed_here, entry)
        )
        if ask is None:
            entry.retry_at = now + _RETRY_S
            return
        prompt, entry.named_blocks, entry.wait_s = prompt[: ask.blocks], ask.blocks, ask.wait_s
        reserve = max(0, self._blocks(num_tokens) - len(prompt))
        entry.changed, entry.private = False, ask.private or now > entry.patience_until
        entry.grant = self._session.acquire(
            self._namespace,
            entry.lease,
            prompt,
            reserve=min(reserve, self._session.max_message_blocks),
            private_fill=entry.private,
        )
        entry.phase = Phase.ASKED

    def _take_answer(self, entry: Entry, num_tokens: int) -> None:
        assert entry.grant is not None
        if not entry.grant.done():
            if not self._session.available:
                self._start_without_answer(entry, num_tokens)
            return
        if entry.grant.error is not None:
            self._start_without_answer(entry, num_tokens)
            return
        grant = entry.grant.result(0)
        waits = grant.outcomes >= Outcome.PROMOTING
        missing = self._blocks(num_tokens) - entry.named_blocks - len(grant.reserve_slots)
        extra = None if waits.any() else self._session.take_credit(max(0, missing))
        if extra is None:
            # Where something is on its way no slots are given yet, so that none of them can be lacking.
            short = not waits.any() or bool((grant.outcomes == Outcome.NO_SLOT).any())
            entry.lacks_room = short or bool((grant.outcomes == Outcome.LATER).any())
            most_s = min(self._patience.seconds, entry.wait_s)
            self._wait_for_change(entry, retry_s=_RETRY_S if short else most_s)
            if short:
                self._find_slots()
            return
        if missing > 0:
            self._session.cancel(
                entry.lease
            )  # the store gave less than was asked for, and believes that it waits
        self._start(entry, grant, extra)

    def _wait_for_change(self, entry: Entry, *, retry_s: float) -> None:
        """Gives everything back, so that nobody is hindered; asks again when the store says that something changed."""
        assert entry.grant is not None
        entry.grant.abandon()
        entry.grant = None
        entry.phase = Phase.QUEUED
        entry.retry_at = 0.0 if entry.changed else self._clock() + retry_s

    def _find_slots(self) -> None:
        """A request lacks slots: lets go of those that this engine has and does not use."""
        self._ahead.yield_pages()
        self.write_through.shed(MAX_UNUSED_S)
        if not self._num_admitted:
            self._session.pause_credit()  # nothing decodes: those in hand may be all that is lacking

    def _make_way(self) -> None:
        """What is in the way of a request that the engine asks for: see `Unasked`."""
        ended: list[Entry] = []
        for entry in self._unasked.in_the_way():
            if entry.gives_back:
                self._start_again(entry)
            if entry.phase is Phase.QUEUED:
                self._end_turn(entry)
                ended.append(entry)
        for entry in reversed(ended):  # in the order in which they are to run: they are due alike by now
            if entry.due_at:
                self._announce(entry)

    def _end_turn(self, entry: Entry) -> None:
        """A request waits as if it had not asked yet."""
        self._plans.end(entry.lease)
        self._session.cancel(entry.lease)
        entry.turn_at = entry.patience_until = entry.retry_at = 0.0
        entry.lacks_room = False

    def _start_again(self, entry: Entry) -> None:
        """A request that does not run yet gives back what it got."""
        self._plans.end(entry.lease)
        if entry.grant is not None:
            entry.grant.abandon()
        if entry.load is not None and not entry.load.begun:
            entry.load.withdraw(self._copier)
        self._session.stage(dropped_hbm=entry.slots)
        entry.grant = entry.load = entry.admission = None
        entry.slots, entry.pages = NO_SLOTS, NO_PAGES
        entry.phase, entry.lost, entry.lacks_room, entry.retry_at = Phase.QUEUED, False, False, 0.0

    def _start(self, entry: Entry, grant: Grant, extra: SlotRun) -> None:
        """Every block has its slot: hits are there or are copied from DRAM, the rest is to be computed."""
        self._session.resume_credit()
        entry.lacks_room = False
        hit = grant.outcomes != Outcome.MISS
        in_dram = grant.outcomes == Outcome.HIT_DRAM
        entry.grant = None
        self._cover(entry, np.concatenate([grant.hbm_slots, grant.reserve_slots, extra.slots]))
        entry.lost = self._wrong.among(entry.slots)
        entry.sealed_blocks = int(hit.sum())
        outcomes = grant.outcomes[: entry.sealed_blocks]
        entry.admission = admission(outcomes, entry.found, self.block_tokens)
        entry.phase = Phase.LOADING
        self._plans.begin(entry.lease, entry.sealed_blocks)
        if in_dram.any():
            entry.load = Load(
                self._session,
                SlotRun(slots=grant.dram_slots[in_dram], generations=grant.dram_generations[in_dram]),
                SlotRun(slots=grant.hbm_slots[in_dram], generations=grant.hbm_generations[in_dram]),
            )

    def _finish_load(self, entry: Entry, num_tokens: int) -> None:
        load, admission = entry.load, entry.admission
        if load is not None and not load.loaded and admission is not None:
            load.submit(self._copier, self._arrival(load, admission, num_tokens))
            if load.failed:
                raise Unavailable("what is cached of it cannot be loaded: the copier has failed")
            if load.arriving is None or entry.lost:
                return
            entry.admission = replace(admission, arriving=load.arriving)  # for its first step to wait
        self._note_load(entry)
        if entry.lost or (load is not None and load.wrong):
            self._start_again(entry)
        else:
            self._admit(entry)

    def _arrival(self, load: Load, admission: Admission, num_tokens: int) -> Arrival | None:
        """Of a load that is about to begin, where it is to come in groups of layers: for a request that is alone."""
        if self.layer_groups is None or load.begun or len(self._requests) > 1:
            return None
        return self._plans.arrival(self.layer_groups, load, admission.cached_tokens, num_tokens)

    def _note_load(self, entry: Entry) -> None:
        if entry.load is not None and entry.load.loaded:
            self._plans.loaded(entry.load)
            entry.load = None

    def _start_without_answer(self, entry: Entry, num_tokens: int) -> None:
        """The daemon is away: compute everything in slots of the credit, or ask again later; at last, fail."""
        self._wait_for_change(entry, retry_s=_RETRY_S)
        run = self._session.take_credit(self._blocks(num_tokens))
        if run is not None:
            self._cover(entry, run.slots)
            entry.sealed_blocks = 0
            entry.admission = Admission(cached_tokens=0, cached_by_tier={})
            self._admit(entry)
        elif self._absence.seconds() >= self._away_s:
            raise Unavailable("the daemon is away: start `kvstore serve`")

    def _admit(self, entry: Entry) -> None:
        entry.phase = Phase.ADMITTED
        self._telling.hurry()
        self._plans.admitted(entry.lease, entry.sealed_blocks)
        self._num_admitted += 1
        self._pace.let_in(self._clock(), len(self._requests) - self._num_admitted)

    # ------------------------------------------------------------ running requests

    def pages(self, request: RequestId) -> NDArray[np.int32]:
        """See BlockManager."""
        return self._requests[request].pages

    def reserve(self, request: RequestId, num_tokens: int) -> bool:
        """See BlockManager. False also for a request that has lost a page: preempted, it is computed again."""
        entry = self._requests[request]
        if entry.lost:
            return False
        missing = self._blocks(num_tokens) - len(entry.slots)
        if missing <= 0:
            return True
        run = self._session.take_credit(missing)
        if run is None:
            self._ahead.yield_pages()
            self._session.want_credit(missing)
            self._telling.hurry()
            return False
        self._cover(entry, run.slots)
        return True

    def reach(self, request: RequestId, num_tokens: int) -> Reach:
        """See BlockManager. What is loaded from behind comes into the table here."""
        self._absorb_events()  # what was lost must not come into a table
        entry = self._requests[request]
        progress = self._plans.progress(entry.lease, num_tokens, alone=len(self._requests) == 1)
        if progress is None:
            return Reach(computed_tokens=num_tokens, stop_tokens=EVERYTHING)
        for piece in progress.pieces:
            entry.slots, unused = piece.into(entry.slots, self._blocks(num_tokens))
            self._session.stage(dropped_hbm=unused)
        if progress.pieces:
            entry.pages = self._session.hbm.page_of(entry.slots)
            self._session.step()  # what is of no more use here may be what the next pieces lack
        entry.overtaken += progress.overtaken
        return progress.reach

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """See BlockManager."""
        self._choice.computed(spans, seconds)

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        """See BlockManager."""
        entry = self._requests[request]
        hashed = entry.chain.num_tokens
        if num_tokens > hashed:
            entry.chain.extend(token_ids[hashed:num_tokens])
        self._note_load(entry)
        full = num_tokens // self.block_tokens
        self._telling.sealed(goes_on=full < entry.cap_blocks)
        if full > entry.sealed_blocks and not entry.lost:
            begin = entry.sealed_blocks
            for skipped in (*entry.overtaken, range(full, full)):
                self._seal(entry, range(begin, min(full, skipped.start)))
                begin = max(begin, skipped.stop)
            entry.sealed_blocks = full

    def ended(self, request: RequestId, ending: Ending) -> None:
        """See BlockManager."""
        say_ended(self._session, self._namespace, self._requests[request].chain.hashes, ending)

    def release(self, request: RequestId) -> None:
        """See BlockManager."""
        entry = self._requests.pop(request, None)
        if entry is None:
            return
        del self._by_lease[entry.lease]
        self._plans.end(entry.lease)
        self._ahead.end(request)
        if entry.grant is not None:
            entry.grant.abandon()
        if entry.phase is Phase.ADMITTED:
            self._num_admitted -= 1
        else:
            self._session.cancel(entry.lease)
        if entry.load is not None:
            entry.load.withdraw(self._copier)
        self._session.stage(dropped_hbm=entry.slots)
        self._telling.hurry()

    def report_wrong(self, request: RequestId, block: int, detail: str) -> None:
        """See BlockManager. The daemon is told by a thread of its own: a call may take until its time-out."""
        hashes = self._requests[request].chain.hashes[block : block + 1].copy()
        report = functools.partial(self._session.report_wrong, self._namespace, hashes, detail)
        threading.Thread(target=report, name="report-wrong", daemon=True).start()

    def take_wrong(self) -> list[RequestId]:
        """See BlockManager."""
        self._absorb_events()
        lost = [
            name for name, entry in self._requests.items() if entry.lost and entry.phase is Phase.ADMITTED
        ]
        return [request for request in lost if self._wrong.among(self._requests[request].slots)]

    def computing(self, steps: int) -> None:
        """See BlockManager."""
        self._copier.computing(steps)

    def end_step(self) -> None:
        """See BlockManager. Most steps only decode, and end here with nothing to do: see `Telling`."""
        waiting = len(self._requests) > self._num_admitted
        due = self._telling.due(waiting=waiting)
        if due or waiting:
            self._keep_in_touch()
            if due:
                self._session.step()
            self._absorb_events()

    def wait(self, timeout_s: float) -> None:
        """See BlockManager."""
        self._keep_in_touch()
        self._session.step()
        self._absorb_events()
        since = self._clock() - MAX_UNUSED_S  # one that the engine does not ask for is no reason to wake it
        waiting = [entry for entry in self._requests.values() if entry.asked_at >= since]
        retries = [entry.retry_at for entry in waiting if entry.phase is Phase.QUEUED or entry.may_go_on]
        soonest = max(0.001, min(retries) - self._clock()) if retries else timeout_s
        self._session.wait(min(timeout_s, soonest))

    # ------------------------------------------------------------ parts

    def _keep_in_touch(self) -> None:
        self.adoption.poll()
        self._ahead.poll()
        self._make_way()
        self._choice.settle()
        self._absence.note(self._session.available)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _cover(self, entry: Entry, slots: _U32) -> None:
        """Appends slots to the block table."""
        entry.slots = np.concatenate([entry.slots, slots])
        entry.pages = np.concatenate([entry.pages, self._session.hbm.page_of(slots)])

    def _seal(self, entry: Entry, blocks: range) -> None:
        if len(blocks):
            records = seals(self._session, self._namespace, entry.chain.hashes, entry.slots, blocks)
            self._session.stage(seals=records)

    def _absorb_events(self) -> None:
        if self._wrong.news():
            self._ahead.yield_pages()
            for each in self._requests.values():
                self._plans.end(each.lease)
                each.lost |= self._wrong.among(each.slots)
        for event in self._session.poll():
            if isinstance(event, Changed):
                for lease in event.leases:
                    if (entry := self._by_lease.get(lease)) is not None:
                        entry.retry_at, entry.changed = 0.0, True
            elif isinstance(event, Lost):
                for entry in self._requests.values():
                    self._plans.end(entry.lease)
                    if entry.phase is Phase.ASKED and entry.may_go_on:
                        self._start_again(entry)
                    entry.lost |= bool(np.isin(entry.slots, event.hbm_slots).any())
