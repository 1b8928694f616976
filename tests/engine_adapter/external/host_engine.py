"""A stand-in for an engine with HBM of its own: pages in host memory, a prefix cache above them, calls in vLLM's order.

What it computes into a page is a function of all tokens up to the page's end, so that a wrong block shows wherever it
comes from. One scheduling half, any number of ranks, each with a part of every block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Ending
from engine_adapter.copying.copier import TwinCopier
from engine_adapter.external.jobs import StepPlan
from engine_adapter.external.link import Identity, LinkPlan, StoreLink
from engine_adapter.external.moving import PieceMover
from engine_adapter.external.pages import Dimension, LayerPages, PieceMap, part_bytes
from engine_adapter.external.ranks import RankGroup, RankListener
from engine_adapter.external.request import RequestFacts
from engine_adapter.external.scheduling import Scheduling, SchedulingRules
from engine_adapter.external.working import Working
from kvstore.cache_use import Access, CacheUse
from kvstore.client.dram_member import DramMember
from kvstore.geometry import Geometry, LayerGroup
from tests.support.daemon import DEADLINE_S, wait_for

__all__ = ["BLOCK", "HostEngine", "parts_of"]

BLOCK, LAYERS, CONTENT = 4, 3, 512
"""Tokens a block; layers; bytes of a layer's page."""
_PATIENT = {"lookup_s": DEADLINE_S, "load_s": DEADLINE_S}
"""A test of what comes waits for it however slow the machine is; one of what is given up names its own times."""


def parts_of(identity: Identity) -> dict[str, bytes]:
    """A namespace of this engine."""
    parts = {"model": b"host", "weights": b"1", "dtype": b"bytes", "block_tokens": b"4", "groups": b"g"}
    if identity.adapter is not None:
        parts["adapter"] = " ".join(identity.adapter).encode()
    if identity.salt is not None:
        parts["salt"] = identity.salt.encode()
    if identity.epoch:
        parts["epoch"] = identity.epoch.encode()
    return parts


@dataclass(slots=True)
class _Running:
    facts: RequestFacts
    tokens: list[int]
    left: int  # tokens to generate
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "waiting"
    cached: int = 0  # tokens that were not computed


class _Rank:
    """Pages `[layer, page, bytes]`, and what copies them."""

    def __init__(self, number: int, ranks: int, num_pages: int) -> None:
        self.pages: NDArray[np.uint8] = np.zeros((LAYERS, num_pages, CONTENT), dtype=np.uint8)
        layers = [
            LayerPages(
                group=0,
                address=int(layer.ctypes.data),
                block_stride=CONTENT,
                itemsize=1,
                dimensions=(Dimension(name="C", size=CONTENT, stride=1),),
            )
            for layer in self.pages
        ]
        pieces = PieceMap(layers)
        self.member = DramMember(number + 1, timeout_s=DEADLINE_S)
        self.copier = TwinCopier()
        self.mover = PieceMover(pieces, self.copier)
        self.working = Working(
            self.member, self.mover, part=number, part_bytes=part_bytes(pieces.payload_bytes)
        )
        self.listener = RankListener(
            lambda said: self.member.join(said.path, bytes.fromhex(said.token), said.slot_bytes),
            timeout_s=DEADLINE_S,
        )

    def close(self) -> None:
        self.listener.close()
        self.working.close(DEADLINE_S)
        self.member.close()


class HostEngine:
    """See the module. `failed`: requests that ended with an error; `bad`: blocks that were not what they must be."""

    def __init__(
        self,
        socket: str,
        *,
        ranks: int = 1,
        num_pages: int = 64,
        policy: str = "recompute",
        room: int = 16,
        breaker_s: float = 5.0,
        return_s: float = DEADLINE_S,
        ahead: int = 0,
        use: CacheUse = CacheUse.ON,
        tenant: str = "",
        **rules: float,
    ) -> None:
        """`ahead`: tokens of a step that it does not know yet, as of an engine that schedules asynchronously."""
        self._ahead = ahead
        self.ranks = [_Rank(number, ranks, num_pages) for number in range(ranks)]
        nbytes = ranks * part_bytes(LAYERS * CONTENT)
        geometry = Geometry(
            groups=(LayerGroup(layers=1, kv_heads=1, head_dim=nbytes // (2 * BLOCK), block_tokens=BLOCK),),
            dtype="float8_e4m3fn",
        )
        self.link = StoreLink(
            LinkPlan(
                socket=socket,
                name="host engine",
                timeout_s=DEADLINE_S,
                geometry=geometry,
                group=RankGroup([rank.listener.name for rank in self.ranks], timeout_s=DEADLINE_S),
                room_blocks=room,
                parts=parts_of,
                breaker_s=breaker_s,
                return_s=return_s,
                use=use,
                tenant=tenant,
            )
        )
        self.policy = policy
        self.scheduling = Scheduling(
            self.link,
            SchedulingRules(
                block_tokens=BLOCK,
                ranks=ranks,
                promise_disk=policy == "recompute",
                **{**_PATIENT, **rules},  # type: ignore[arg-type]
            ),
        )
        self.requests: dict[str, _Running] = {}
        self.finished: dict[str, _Running] = {}
        self.ending: Ending | None = None  # of all answers
        self.failed: list[str] = []
        self.bad: list[str] = []
        self._free = list(range(1, num_pages))  # page 0 is nobody's
        self._own: dict[tuple[int, ...], int] = {}  # our prefix cache: tokens up to a block's end → page
        self._uses: dict[int, int] = {}
        self._held: dict[str, list[int]] = {}  # of requests that have ended, until they are named
        self._preempted: list[str] = []

    # ------------------------------------------------------------ what a test does

    def attached(self) -> None:
        """Returns once there is a session, its stream is open and slots have come."""
        wait_for("a session", lambda: self.link.session is not None)
        session = self.link.session
        assert session is not None
        stores = session.use.access & Access.WRITES
        wait_for("the stream", lambda: session.connected and bool(session.room_in_hand or not stores))
        wait_for("the namespace", lambda: self.link.namespace(Identity()) is not None)

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        generate: int = 1,
        salt: str | None = None,
        adapter: tuple[str, str] | None = None,
    ) -> None:
        """Queues a request."""
        growing = list(tokens)
        facts = RequestFacts(id=name, token_ids=growing, identity=Identity(salt=salt, adapter=adapter))
        self.requests[name] = _Running(facts, growing, generate)
        self.scheduling.new(facts)

    def ask(self, name: str, tokens: Sequence[int], **more: object) -> int:
        """Runs one request to its end; how many of its tokens were not computed."""
        self.add(name, tokens, **more)  # type: ignore[arg-type]
        self.run(lambda: name in self.finished or name in self.failed)
        self.drain()
        return self.finished[name].cached if name in self.finished else -1

    def run(self, until: Callable[[], bool], timeout_s: float = 2 * DEADLINE_S) -> None:
        """Steps until something is so."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, "the engine does not get there"
            self.step()

    def drain(self) -> None:
        """Steps until nothing is under way, and waits until the service has heard it: it must be there."""
        self.run(lambda: not self.scheduling.busy and not self._held)
        session = self.link.attached
        if session is not None:
            wait_for("what was said to be heard", lambda: session.drain(DEADLINE_S))

    def forget(self) -> None:
        """Our own prefix cache is empty."""
        for page in self._own.values():
            if not self._uses.get(page):
                self._free.append(page)
        self._own.clear()

    def preempt(self, name: str) -> None:
        """Takes a running request's pages at once, as vLLM does."""
        request = self.requests[name]
        assert request.state == "running"
        self._let_go(request.pages)
        request.pages, request.computed, request.state = [], 0, "waiting"
        self._preempted.append(name)

    def abort(self, name: str) -> None:
        """Ends a request early."""
        self._end(self.requests[name])

    def close(self) -> None:
        """Ends everything."""
        for rank in self.ranks:
            rank.close()
        self.link.close(DEADLINE_S)

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    # ------------------------------------------------------------ a step, in vLLM's order

    def step(self) -> None:
        """Schedule, load, compute, store, report."""
        computed: list[tuple[str, int]] = []
        for name, request in list(self.requests.items()):
            if request.state == "waiting" and not self._admit(name, request):
                continue
            if request.state == "running":
                self._grow(request)
                computed.append((name, len(request.tokens) + self._ahead))
        preempted, self._preempted = self._preempted, []
        plan = self.scheduling.plan(computed, preempted, lambda name: [self.requests[name].pages])
        outputs = [self._run_rank(rank, plan, computed) for rank in self.ranks]
        received = [requests for _, requests, _ in outputs]
        sent = [requests for requests, _, _ in outputs]
        self._count(sent, received)
        for _, _, failed in outputs:
            self._failed(failed)
        for rank in self.ranks:
            report = rank.working.report()
            if report is not None:
                self.scheduling.report(report)
        self._loaded()
        for name, _ in computed:
            request = self.requests.get(name)
            if request is not None and request.state == "running":
                self._sampled(request)

    def _admit(self, name: str, request: _Running) -> bool:
        own = self._own_prefix(request)
        found = self.scheduling.matched(name, len(request.tokens), len(own) * BLOCK)
        if found is None:
            return False
        wanted = -(-len(request.tokens) // BLOCK) - len(own)
        if wanted > len(self._free):
            return False
        for page in own:
            self._uses[page] = self._uses.get(page, 0) + 1
        request.pages = own + [self._take() for _ in range(wanted)]
        request.cached = len(own) * BLOCK + found
        request.computed = request.cached
        self.scheduling.allocated(name, [request.pages] if found else (), found)
        request.state = "loading" if found else "running"
        return not found

    def _run_rank(
        self, rank: _Rank, plan: StepPlan, computed: list[tuple[str, int]]
    ) -> tuple[set[str], set[str], set[int]]:
        rank.working.before_step(plan)
        rank.working.begin_loads(plan)
        for name, _ in computed:
            self._compute(rank, self.requests[name])
        rank.working.begin_stores(plan)
        received = rank.working.received()
        return rank.working.sent(), set(received.requests), set(received.failed_pages)

    def _compute(self, rank: _Rank, request: _Running) -> None:
        for block in range(request.computed // BLOCK, len(request.pages)):
            rank.pages[:, request.pages[block]] = self._expected(request, block, rank)

    def _expected(self, request: _Running, block: int, rank: _Rank) -> NDArray[np.uint8]:
        """[layer, bytes] of a block of all tokens that it has so far."""
        prefix = tuple(request.tokens[: (block + 1) * BLOCK])
        seed = hash((prefix, self.ranks.index(rank), request.facts.identity.salt)) & 0xFFFFFFFF
        return np.random.default_rng(seed).integers(0, 256, (LAYERS, CONTENT), dtype=np.uint8)

    def _check(self, request: _Running) -> None:
        for rank in self.ranks:
            for block in range(len(request.tokens) // BLOCK):
                if not np.array_equal(
                    rank.pages[:, request.pages[block]], self._expected(request, block, rank)
                ):
                    self.bad.append(f"{request.facts.id} block {block}")

    # ------------------------------------------------------------ parts

    def _own_prefix(self, request: _Running) -> list[int]:
        pages = []
        for block in range((len(request.tokens) - 1) // BLOCK):
            page = self._own.get(self._name(request, block))
            if page is None:
                break
            pages.append(page)
        return pages

    @staticmethod
    def _name(request: _Running, block: int) -> tuple[int, ...]:
        salt = request.facts.identity.salt
        return (*request.tokens[: (block + 1) * BLOCK], hash((salt, request.facts.identity.adapter)))

    def _grow(self, request: _Running) -> None:
        while len(request.pages) * BLOCK < len(request.tokens):
            request.pages.append(self._take())

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def _let_go(self, pages: Sequence[int]) -> None:
        kept = set(self._own.values())
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page] and page not in kept:
                self._free.append(page)

    def _sampled(self, request: _Running) -> None:
        """Full blocks are in our own cache from now on; one more token, or the end."""
        self._check(request)
        for block in range(len(request.tokens) // BLOCK):
            self._own.setdefault(self._name(request, block), request.pages[block])
        request.computed = len(request.tokens)
        if not request.left:
            self.finished[request.facts.id] = request
            self._end(request)
            return
        request.left -= 1
        request.tokens.append((sum(request.tokens) * 31 + len(request.tokens)) % 50_000)

    def _end(self, request: _Running) -> None:
        name = request.facts.id
        computed = request.computed if request.state == "running" else 0
        held = self.scheduling.ended(name, [request.pages] if computed else (), computed, self.ending)
        del self.requests[name]
        if held or request.state == "loading":
            self._held[name] = request.pages
        else:
            self._let_go(request.pages)

    def _count(self, *by_rank: list[set[str]]) -> None:
        """A request is sent or received once every rank has named it."""
        for outputs in by_rank:
            for names in outputs:
                for name in names:
                    self._named[name] = self._named.get(name, 0) + 1

    @property
    def _named(self) -> dict[str, int]:
        self.__dict__.setdefault("named", {})
        found: dict[str, int] = self.__dict__["named"]
        return found

    def _failed(self, pages: set[int]) -> None:
        for name, request in list(self.requests.items()):
            at = [block for block, page in enumerate(request.pages) if page in pages]
            if request.state == "loading" and at:
                request.cached = request.computed = min(request.computed, at[0] * BLOCK)
                if self.policy == "fail":
                    self.failed.append(name)

    def _loaded(self) -> None:
        for name, ranks in list(self._named.items()):
            if ranks < len(self.ranks):
                continue
            del self._named[name]
            if name in self._held:
                self._let_go(self._held.pop(name))
                continue
            request = self.requests[name]
            assert request.state == "loading", f"{name} was named twice"
            request.state = "running"
            if name in self.failed:
                self._end(request)
