"""Blocks by name over a real daemon: what was stored is what is loaded, and whatever dies or is full is a miss."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.external.link import LinkPlan, StoreLink
from engine_adapter.external.page_store import PageStore, Patience, Run
from kvstore.cache_use import CacheUse
from kvstore.client import connect
from kvstore.errors import Unavailable
from kvstore.geometry import opaque_geometry
from kvstore.layout import NONE, Tier
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for

PAGE_BYTES = 30_000  # not a whole number of 4 KiB
PARTS = {
    "model": b"pages",
    "weights": b"1",
    "dtype": b"uint8",
    "block_tokens": b"1",
    "groups": b"opaque 30000",
}
QUICK = Patience(load_s=1.0, store_s=0.5, answer_s=1.0)
"""For tests of what is given up; all others wait for what comes, however slow the machine is."""
PATIENT = Patience(load_s=DEADLINE_S, store_s=DEADLINE_S, answer_s=DEADLINE_S)
_FIRST = iter(range(1, 1 << 30))


class Engine:
    """Pages in this process's memory, by id."""

    def __init__(
        self,
        socket: str,
        *,
        parts: dict[str, bytes] = PARTS,
        patience: Patience = PATIENT,
        breaker_s: float = 5.0,
        portion: int = 16,
        use: CacheUse = CacheUse.ON,
    ) -> None:
        self.link = StoreLink(
            LinkPlan(
                socket=socket,
                name="pages",
                timeout_s=DEADLINE_S,
                geometry=opaque_geometry(PAGE_BYTES),
                group=None,
                room_blocks=32,
                parts=lambda identity: (
                    {**parts, "epoch": identity.epoch.encode()} if identity.epoch else parts
                ),
                breaker_s=breaker_s,
                use=use,
            )
        )
        self.store = PageStore(self.link, payload_bytes=PAGE_BYTES, portion=portion, patience=patience)
        self.copied = 0

    def await_store(self) -> None:
        wait_for("the store", lambda: self.store.cached(Run(ids=[])) == 0 and self.store.ready)

    def put(self, ids: Sequence[bytes], before: Sequence[bytes] = ()) -> list[bool]:
        def copy(place: int, address: int) -> None:
            self.copied += 1
            source = page(ids[place])
            ctypes.memmove(address, source.ctypes.data, PAGE_BYTES)

        return self.store.store(Run(ids=ids, before=before), copy).tolist()

    def get(self, ids: Sequence[bytes], before: Sequence[bytes] = ()) -> int:
        """How many leading pages came; each is checked byte for byte."""
        target = np.zeros((len(ids), PAGE_BYTES), dtype=np.uint8)

        def copy(place: int, address: int) -> None:
            ctypes.memmove(target[place].ctypes.data, address, PAGE_BYTES)

        marks = self.store.load(Run(ids=ids, before=before), copy)
        count = int(marks.sum())
        assert marks[:count].all()
        for place in range(count):
            assert np.array_equal(target[place], page(ids[place]))
        return count


def page(id_: bytes) -> NDArray[np.uint8]:
    seed = int.from_bytes(id_[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size=PAGE_BYTES, dtype=np.uint8)


def prompt(pages: int) -> list[bytes]:
    """Ids that nobody else has, 32 bytes each."""
    return [next(_FIRST).to_bytes(8, "little") + bytes(24) for _ in range(pages)]


@contextmanager
def engine(socket: str, **options: object) -> Iterator[Engine]:
    made = Engine(socket, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.link.close(DEADLINE_S)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


@pytest.fixture
def pages(service: Service) -> Iterator[Engine]:
    with engine(service.socket) as made:
        made.await_store()
        yield made
    assert service.faults() == []


def test_what_was_stored_is_loaded_by_another_engine(service: Service, pages: Engine) -> None:
    ids = prompt(40)  # more than a portion
    assert pages.store.cached(Run(ids=ids)) == 0
    assert pages.get(ids) == 0
    assert pages.put(ids[:25]) == [True] * 25
    assert pages.put(ids[25:], before=ids[:25]) == [True] * 15
    with engine(service.socket) as other:
        other.await_store()
        assert other.store.cached(Run(ids=ids)) == 40
        assert other.get(ids) == 40
        assert other.get(ids[30:], before=ids[:30]) == 10
        assert other.get([*ids[:7], *prompt(3)]) == 7


def test_what_is_there_is_not_copied_again(pages: Engine) -> None:
    ids = prompt(6)
    pages.put(ids[2:4])
    pages.copied = 0
    assert pages.put(ids) == [True] * 6
    assert pages.copied == 4
    assert pages.get(ids) == 6


@pytest.mark.parametrize(
    "use, served, stored",
    [
        (CacheUse.READ, True, False),
        (CacheUse.WRITE, False, True),
        (CacheUse.OFF, False, False),
        (CacheUse.DRY_RUN, False, True),
    ],
)
def test_an_engine_uses_of_the_store_what_it_says(
    service: Service, pages: Engine, use: CacheUse, served: bool, stored: bool
) -> None:
    known, new = prompt(5), prompt(3)
    assert pages.put(known) == [True] * 5
    with engine(service.socket, use=use) as other:
        other.await_store()
        before = service.stats().counters
        assert other.store.cached(Run(ids=[*known, *new])) == (5 if served else 0)
        assert other.get(known) == (5 if served else 0)
        assert other.put(known) == [True] * 5  # it is there, whoever may read it
        assert other.copied == 0
        assert other.put(new) == [stored] * 3
        assert other.copied == (3 if stored else 0)
        assert pages.get(new) == (3 if stored else 0)
        assert other.link.session is not None
        assert other.link.session.drain(DEADLINE_S)
        after = service.stats().counters
        counted = 8 if use is CacheUse.DRY_RUN else 0
        assert after.get("blocks_dry_run", 0) - before.get("blocks_dry_run", 0) == counted
        assert after.get("blocks_would_hit_dram", 0) - before.get("blocks_would_hit_dram", 0) == (
            5 if counted else 0
        )


def test_slots_have_no_bytes_of_others_behind_their_payload(service: Service, pages: Engine) -> None:
    """The rest of a slot reached disk and exports with whatever its last block had there."""
    ids = prompt(3)
    pages.put(ids)
    session = pages.link.session
    assert session is not None
    seen = []
    columns = session.tables.tables.columns
    rows = columns.pool(Tier.DRAM).row
    for slot in np.flatnonzero(rows != NONE).tolist():
        whole = session.dram.view(slot)
        if any(np.array_equal(whole[:PAGE_BYTES], page(id_)) for id_ in ids):
            seen.append(slot)
            assert not whole[PAGE_BYTES:].any()
    assert len(seen) == 3


def test_another_model_or_layout_finds_nothing(service: Service, pages: Engine) -> None:
    ids = prompt(3)
    pages.put(ids)
    with engine(service.socket, parts={**PARTS, "groups": b"other"}) as other:
        other.await_store()
        assert other.store.cached(Run(ids=ids)) == 0
        assert other.get(ids) == 0


def test_a_full_tier_gives_something_up_and_fails_nothing(pages: Engine) -> None:
    """64 MiB have room for 2,048 slots of 32 KiB: 3,000 pages do not fit. Which go is the policy's affair."""
    prompts = [prompt(64) for _ in range(46)]
    for ids in prompts:
        assert all(pages.put(ids))
        pages.get(ids)
    assert 0 < sum(pages.get(ids) for ids in prompts) <= 2048


def test_nothing_is_left_held(service: Service, pages: Engine) -> None:
    """A load that ended early kept its slots, and DRAM filled with what nobody could evict."""
    ids = prompt(20)
    pages.put(ids)
    for count in range(1, 20):
        assert pages.get([*ids[:count], *prompt(1)]) == count
    session = pages.link.session
    assert session is not None
    assert session.drain(DEADLINE_S)

    def held() -> int:
        return sum(s.held_dram_slots for s in service.stats().sessions if s.name == "pages")

    wait_for("only room in hand is held", lambda: held() <= session.room_in_hand)
    assert session.room_in_hand <= 32


def test_a_copy_that_fails_leaves_nothing_held_or_stored(service: Service, pages: Engine) -> None:
    ids = prompt(4)

    def fail(place: int, address: int) -> None:
        if place == 2:
            raise OSError("the engine's memory is gone")

    with pytest.raises(OSError, match="is gone"):
        pages.store.store(Run(ids=ids), fail)
    assert pages.store.cached(Run(ids=ids)) == 0
    pages.put(ids)
    with pytest.raises(OSError, match="is gone"):
        pages.store.load(Run(ids=ids), fail)
    assert pages.get(ids) == 4
    session = pages.link.session
    assert session is not None
    wait_for("nothing is used", lambda: not session._state.dram.references.any())


def test_what_is_cleared_is_gone_and_nothing_else(service: Service, pages: Engine) -> None:
    ids = prompt(5)
    pages.put(ids)
    with (
        engine(service.socket, parts={**PARTS, "salt": b"other"}) as other,
        connect(service.socket) as client,
    ):
        other.await_store()
        other.put(ids)
        assert pages.store.clear(client) >= 5
        assert pages.store.cached(Run(ids=ids)) == 0
        assert pages.get(ids) == 0
        assert other.get(ids) == 5
        pages.await_store()
        assert pages.put(ids) == [True] * 5
        assert pages.get(ids) == 5
        with engine(
            service.socket
        ) as later:  # weights may have changed: only a new start knows which they are
            later.await_store()
            assert later.get(ids) == 0


def test_a_store_from_before_a_clear_is_not_sealed_after_it(service: Service, pages: Engine) -> None:
    """Pages of replaced weights that were on their way came back under the old name. Later such a store waited for an
    answer to seals that it had not sent."""
    ids, began = prompt(3), time.monotonic()
    with connect(service.socket) as client:

        def clears_meanwhile(place: int, address: int) -> None:
            if place == 1:
                pages.store.clear(client)

        assert not pages.store.store(Run(ids=ids), clears_meanwhile).any()
    assert time.monotonic() - began < DEADLINE_S / 2
    with engine(service.socket) as later:
        later.await_store()
        assert later.store.cached(Run(ids=ids)) == 0


@pytest.mark.engine
def test_without_a_daemon_a_clear_is_an_error_and_holds_all_the_same(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    ids = prompt(3)
    with (
        engine(config.socket, patience=QUICK, breaker_s=0.3) as pages,
        connect(config.socket) as client,
        started(config) as service,
    ):
        pages.await_store()
        pages.put(ids)
        daemon = service.daemon_pid
        os.kill(daemon, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="nothing is forgotten"):
            pages.store.clear(client)
        os.kill(daemon, signal.SIGCONT)
        pages.await_store()
        assert pages.get(ids) == 0


@pytest.mark.engine
def test_blocks_come_from_disk_after_everything_died(tmp_path: Path) -> None:
    ids = prompt(50)
    config = small_config(tmp_path, nvme_bytes=64 << 20)
    with started(config) as service, engine(service.socket) as pages:
        pages.await_store()
        assert pages.put(ids) == [True] * 50
        service.call("Flush", pb.FlushRequest(deadline_ms=20_000), timeout_s=30.0)
        for pid in (service.keeper_pid, service.daemon_pid):
            os.kill(pid, signal.SIGKILL)
    with started(config) as service, engine(service.socket) as pages:
        pages.await_store()
        wait_for("the index", lambda: pages.store.cached(Run(ids=ids)) == 50)
        wait_for("a disk that gives", lambda: pages.get(ids) == 50)
        assert service.tier("dram").sealed_slots >= 50
        assert service.faults() == []


@pytest.mark.engine
def test_an_engine_starts_without_a_daemon_and_picks_it_up(tmp_path: Path) -> None:
    """Each call of an engine whose daemon was not there waited, or raised."""
    config = small_config(tmp_path)
    ids = prompt(4)
    with engine(config.socket) as patient:
        began = time.monotonic()
        assert patient.put(ids) == [False] * 4
        assert patient.get(ids) == 0
        assert patient.store.cached(Run(ids=ids)) == 0
        assert time.monotonic() - began < DEADLINE_S / 2
    with engine(config.socket, patience=QUICK, breaker_s=0.3) as pages:
        assert pages.put(ids) == [False] * 4
        with started(config) as service:
            pages.await_store()
            wait_for("a store", lambda: pages.put(ids) == [True] * 4)
            wait_for("a load", lambda: pages.get(ids) == 4)
            daemon = service.daemon_pid
            os.kill(daemon, signal.SIGSTOP)
            began = time.monotonic()
            assert pages.get(ids) in (0, 4)
            pages.put(prompt(40))
            pages.get(ids)
            assert time.monotonic() - began < DEADLINE_S / 2
            os.kill(daemon, signal.SIGKILL)
            service.await_restart(daemon)
            wait_for("it is back", lambda: pages.get(ids) == 4)
            wait_for("a store", lambda: pages.put(prompt(2)) == [True, True])
            assert service.faults() == []
