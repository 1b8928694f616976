"""Loads of TensorRT-LLM: what a lookup answers is promised, since the engine cannot be told later that it did not come.

So the lookup itself acquires, and answers with what DRAM has: those slots are held until every rank has copied them,
and nothing takes them away meanwhile. What only a disk has is brought up for whoever asks next.

One thread at a time (the leader's lock).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.jobs import CopyJob
from kvstore.client import Namespace, Session
from kvstore.errors import KvstoreError
from kvstore.layout import Tier
from kvstore.moves import Outcome

__all__ = ["Promises"]

_POLL_S = 0.005

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(slots=True)
class _Promise:
    session: Session
    begin: int  # block of the request
    slots: U32  # held
    generations: U32
    pages: NDArray[np.int64] | None = None  # [n], once the engine has taken them


@dataclass(slots=True)
class _Load:
    request: str
    session: Session
    slots: U32
    left: int  # ranks


class Promises:
    """From a lookup's answer to the end of its copies."""

    def __init__(
        self, *, ranks: int, answer_s: float, disk_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`answer_s`: how long a lookup waits for the daemon; `disk_s`: how long for blocks from a disk."""
        self._ranks = ranks
        self._answer_s = answer_s
        self._disk_s = disk_s
        self._clock = clock
        self._promised: dict[str, _Promise] = {}
        self._loads: dict[int, _Load] = {}
        self.loaded_blocks = 0

    def make(
        self, request: str, session: Session, namespace: Namespace, lease: int, hashes: U64, begin: int
    ) -> int:
        """Blocks of the chain from `begin` on that will be loaded. Waits for the daemon, and for a disk as it may."""
        self.withdraw(request)
        found = session.match(namespace, hashes[begin:])
        if not found.hits:
            return 0
        until_s = self._clock() + self._disk_s
        if (found.tiers == Tier.NVME).any():
            session.prefetch(namespace, lease, hashes[: begin + found.hits])
            self._await_disk(session, namespace, hashes[begin : begin + found.hits], until_s)
        grant = session.acquire(namespace, lease, hashes[: begin + found.hits], first=begin)
        try:
            answer = grant.result(self._answer_s)
        except KvstoreError:
            grant.abandon()
            return 0
        hit = answer.outcomes == Outcome.HIT_DRAM
        hits = len(hit) if hit.all() else int(hit.argmin())
        if hits:
            self._promised[request] = _Promise(
                session, begin, answer.dram_slots[:hits], answer.dram_generations[:hits]
            )
        return hits

    def _await_disk(self, session: Session, namespace: Namespace, hashes: U64, until_s: float) -> None:
        while self._clock() < until_s:
            if not (session.match(namespace, hashes).tiers == Tier.NVME).any():
                return
            session.wait(min(_POLL_S, max(0.0, until_s - self._clock())))
            session.poll()

    def allocated(self, request: str, pages_of_request: Sequence[int]) -> None:
        """The engine has taken pages for the request, as `external` counts them: 0 is none for that block.

        Raises KvstoreError where not every promised block has one: what was promised cannot be kept.
        """
        promise = self._promised.get(request)
        if promise is None:
            return
        pages = np.array(pages_of_request[promise.begin : promise.begin + len(promise.slots)], dtype=np.int64)
        if len(pages) != len(promise.slots) or not pages.all():
            raise KvstoreError(
                f"request {request} has {len(pages)} pages for {len(promise.slots)} blocks that are to be loaded: "
                "this way of allocating pages is not supported"
            )
        promise.pages = pages

    def starting(self, numbers: Iterator[int]) -> list[CopyJob]:
        """Loads whose pages are known, each once."""
        jobs = []
        for request, promise in list(self._promised.items()):
            if promise.pages is None:
                continue
            del self._promised[request]
            job = CopyJob(
                number=next(numbers),
                request=request,
                pages=promise.pages[:, None],
                slots=promise.slots,
                generations=promise.generations,
            )
            self._loads[job.number] = _Load(request, promise.session, promise.slots, self._ranks)
            jobs.append(job)
        return jobs

    def withdraw(self, request: str) -> None:
        """Of a promise that no rank knows of nothing will be loaded."""
        promise = self._promised.pop(request, None)
        if promise is not None:
            promise.session.step(dropped_dram=promise.slots)

    def __contains__(self, number: int) -> bool:
        return number in self._loads

    def ended(self, number: int) -> None:
        """One rank has ended a load; with the last one its slots are let go."""
        load = self._loads[number]
        load.left -= 1
        if load.left <= 0:
            del self._loads[number]
            load.session.step(dropped_dram=load.slots)
            self.loaded_blocks += len(load.slots)

    def loading(self, request: str) -> bool:
        """Whether some rank may still write to the request's pages."""
        return any(load.request == request for load in self._loads.values())
