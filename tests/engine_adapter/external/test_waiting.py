"""For what a lookup asks for patience, and until when: a link, a session and a clock that do as they are told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.link import Identity
from engine_adapter.external.request import RequestFacts
from engine_adapter.external.scheduling import Scheduling, SchedulingRules
from engine_adapter.external.settling import Settling
from kvstore.cache_use import Access, CacheUse
from kvstore.client import Namespace
from kvstore.errors import Unavailable
from kvstore.layout import NONE, Tier
from kvstore.match import MatchResult
from kvstore.wire.v1 import kvstore_pb2 as pb

BLOCK = 4
PROMPT = list(range(3 * BLOCK + 1))
HIT = 3 * BLOCK
LOOKUP_S = 2.0


@dataclass(slots=True)
class Columns:
    """Of rows 0 to 2, what of them is in DRAM."""

    dram: NDArray[np.uint32] = field(default_factory=lambda: np.full(3, NONE, dtype=np.uint32))


class TwinSession:
    """Knows three blocks, each in `tiers`."""

    def __init__(self) -> None:
        self.connected = True
        self.available = True
        self.streams = 1
        self.silence_s = 0.0
        self.max_message_blocks = 1024
        self.tiers = [Tier.DRAM] * 3
        self.prefetches = 0
        self.columns = Columns()
        self.use = CacheUse.ON
        self.tables: object = self

    def may(self, namespace: Namespace) -> Access:
        return self.use.access

    def match(self, namespace: Namespace, hashes: NDArray[np.uint64]) -> MatchResult:
        tiers = np.array(self.tiers[: len(hashes)], dtype=np.uint8)
        return MatchResult(rows=np.arange(len(tiers), dtype=np.uint32), tiers=tiers)

    def prefetch(self, namespace: Namespace, lease: int, hashes: NDArray[np.uint64]) -> None:
        self.prefetches += 1


class TwinLink:
    """`here`: whether a daemon was ever attached; `gone`: it is away, and `hope` says whether it is expected back."""

    def __init__(self) -> None:
        self.twin = TwinSession()
        self.here, self.gone, self.hope = True, False, True
        self.opened: Namespace | None = Namespace({}, BLOCK, 1, bytes(32))
        self.settled = True

    @property
    def session(self) -> TwinSession | None:
        return self.twin if self.here and not self.gone else None

    @property
    def attached(self) -> TwinSession | None:
        return self.twin if self.here else None

    @property
    def expected(self) -> TwinSession | None:
        return self.attached if self.hope else None

    def namespace(self, identity: Identity) -> Namespace | None:
        return self.opened

    def coming(self, identity: Identity) -> bool:
        return self.here


class Rig:
    """One request."""

    def __init__(self, *, promise_disk: bool = True) -> None:
        self.link, self.now = TwinLink(), 100.0
        rules = SchedulingRules(block_tokens=BLOCK, ranks=1, lookup_s=LOOKUP_S, promise_disk=promise_disk)
        self.scheduling = Scheduling(self.link, rules, clock=lambda: self.now)  # type: ignore[arg-type]

    def ask(self, name: str = "r") -> int | None:
        """A lookup, 10 ms after the one before."""
        if name not in self.scheduling._requests:
            self.scheduling.new(RequestFacts(id=name, token_ids=PROMPT, identity=Identity()))
        self.now += 0.01
        return self.scheduling.matched(name, len(PROMPT), 0)

    def answer(self, name: str = "r") -> int:
        """What it says at last, and that it does so in time."""
        began = self.now
        while (found := self.ask(name)) is None:
            assert self.now <= began + LOOKUP_S + 0.02
        return found


def test_without_a_daemon_nobody_waits() -> None:
    rig = Rig()
    rig.link.here = False
    rig.link.opened = None
    assert rig.ask() == 0
    assert rig.now < 101


def test_a_lookup_waits_for_a_daemon_that_is_expected_back_and_for_no_other() -> None:
    rig = Rig()
    rig.link.gone, rig.link.twin.connected = True, False
    assert [rig.ask() for _ in range(5)] == [None] * 5
    rig.link.gone = False
    assert rig.ask() is None  # the stream is not open yet: what is asked now might find nobody
    rig.link.twin.connected = True
    assert rig.ask() == HIT
    rig.link.gone, rig.link.twin.connected, rig.link.twin.tiers = True, False, []
    assert rig.ask("not cached") == 0
    rig.link.twin.tables = object()
    assert rig.ask("in the tables of a new daemon") is None
    rig.link.twin.tiers, rig.link.hope = [Tier.DRAM] * 3, False
    assert rig.ask("later") == 0


def test_all_that_a_lookup_waits_for_is_in_one_patience() -> None:
    rig = Rig()
    rig.link.gone, rig.link.twin.connected, began = True, False, rig.now
    while rig.now < began + 1.5:
        assert rig.ask() is None
    rig.link.gone, rig.link.twin.connected = False, True
    rig.link.settled, rig.link.twin.tiers = False, []
    while rig.ask() is None:
        assert rig.now < began + LOOKUP_S + 0.05
    assert rig.now >= began + LOOKUP_S
    rig.link.opened = None
    assert rig.answer("another") == 0  # after a patience of its own


def test_a_miss_is_none_until_the_disks_are_read() -> None:
    """Everything died, and the first prompts were misses: the daemon served before it had read its disks."""
    rig = Rig()
    rig.link.settled = False
    rig.link.twin.tiers = [Tier.DRAM]
    assert rig.ask() is None
    assert rig.link.twin.prefetches == 1
    rig.link.settled, rig.link.twin.tiers = True, [Tier.DRAM] * 3
    assert rig.ask() == HIT
    assert rig.link.twin.prefetches == 2  # the first one found nothing to read
    rig.link.settled, rig.link.twin.tiers = False, [Tier.DRAM]
    assert rig.answer("too late") == BLOCK


def test_what_is_in_dram_does_not_wait_for_disks() -> None:
    rig = Rig()
    rig.link.settled = False
    assert rig.ask() == HIT


def test_a_daemon_that_was_restarted_is_asked_ahead_again() -> None:
    """Under `fail` blocks on a disk were a miss: what their request had asked for died with the daemon."""
    rig = Rig(promise_disk=False)
    rig.link.twin.tiers = [Tier.NVME] * 3
    assert rig.ask() is None
    assert rig.link.twin.prefetches == 1
    rig.link.twin.streams, rig.link.settled = 2, False
    assert rig.ask() is None
    assert rig.link.twin.prefetches == 1
    rig.link.settled = True
    assert rig.ask() is None
    assert rig.link.twin.prefetches == 2
    rig.link.twin.tiers = [Tier.DRAM] * 3
    assert rig.ask() == HIT


class TwinClient:
    """Answers with paths that are in service or not; None: it does not answer."""

    def __init__(self) -> None:
        self.in_service: list[bool] | None = []
        self.calls = 0

    def stats(self) -> pb.StatsReply:
        self.calls += 1
        if self.in_service is None:
            raise Unavailable("away")
        return pb.StatsReply(paths=[pb.PathStats(in_service=one) for one in self.in_service])


def test_disks_are_asked_for_once_a_stream_until_they_are_open_or_the_time_is_over() -> None:
    now = [10.0]
    settling = Settling(5.0, clock=lambda: now[0])
    session, client = TwinSession(), TwinClient()
    assert not settling.known(session)  # type: ignore[arg-type]
    for answer, known in (([True, False], False), (None, False), ([True, True], True)):
        client.in_service = answer  # type: ignore[assignment]
        settling.look(session, client)  # type: ignore[arg-type]
        assert settling.known(session) is known  # type: ignore[arg-type]
    session.streams, client.in_service = 2, [False]
    assert not settling.known(session)  # type: ignore[arg-type]
    settling.look(session, client)  # type: ignore[arg-type]
    now[0] += 5.0
    assert not settling.known(session)  # type: ignore[arg-type]
    settling.look(session, client)  # type: ignore[arg-type]
    assert settling.known(session)  # type: ignore[arg-type]
