"""A session against a real daemon: lookups, grants, memory, errors, and what a lost connection costs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.client import Client, DeviceSpec, Namespace, Session, Targets, connect
from kvstore.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvstoreError,
    ResourceExhausted,
    Unavailable,
)
from kvstore.layout import Tier
from kvstore.moves import Outcome
from kvstore.units import MIB
from kvstore.wire.packed import SEAL
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.worker import BLOCK_TOKENS, PARTS, geometry

PAGES = 64


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with connect(service.socket) as client:
        yield client


@pytest.fixture
def session(client: Client, request: pytest.FixtureRequest) -> Iterator[Session]:
    with attach(client, request.node.name) as session:
        yield session


def attach(client: Client, name: str, *, credit: int = 0, room: int = 0) -> Session:
    device = DeviceSpec(hbm_bytes=PAGES * geometry().slot_bytes)
    return client.attach(name, geometry(), device, targets=Targets(credit=credit, room=room))


_SEEDS = iter(range(1, 1 << 20))


def chain(namespace: Namespace, blocks: int) -> NDArray[np.uint64]:
    tokens = np.arange(blocks * BLOCK_TOKENS) + 1000 * next(_SEEDS)
    return namespace.chain(tokens).hashes


def seals_of(
    namespace: Namespace,
    hashes: NDArray[np.uint64],
    slots: NDArray[np.uint32],
    generations: NDArray[np.uint32],
) -> NDArray[np.void]:
    seals = np.zeros(len(hashes), dtype=SEAL)
    seals["slot"], seals["generation"], seals["namespace"] = slots, generations, namespace.handle
    seals["depth"], seals["hash"] = np.arange(len(hashes)), hashes
    seals["parent"][1:] = hashes[:-1]
    return seals


def store(session: Session, namespace: Namespace, hashes: NDArray[np.uint64]) -> None:
    """Fills, seals and lets go."""
    grant = session.acquire(namespace, 1, hashes).result(30)
    assert set(grant.outcomes.tolist()) == {Outcome.MISS}
    session.step(seals=seals_of(namespace, hashes, grant.hbm_slots, grant.hbm_generations))
    wait_for("the seals", session.quiet)
    session.step(dropped_hbm=grant.hbm_slots)


def test_connect_is_lazy_and_reachable_from_the_package() -> None:
    code = (
        "import sys, kvstore; assert 'grpc' not in sys.modules and 'torch' not in sys.modules;"
        "client = kvstore.connect('/nonexistent/kv.sock'); client.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert kvstore.connect is connect


def test_nobody_listens(tmp_path: Path) -> None:
    with connect(tmp_path / "kv.sock", timeout_s=0.5) as client:
        with pytest.raises(Unavailable):
            client.describe()
        with pytest.raises(Unavailable):
            client.attach("x", geometry())


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        connect("/" + "x" * 120)


def test_a_socket_that_answers_nothing_costs_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "kv.sock"))
        silent.listen()
        began = time.monotonic()
        with (
            connect(tmp_path / "kv.sock", timeout_s=0.3) as client,
            pytest.raises((DeadlineExceeded, Unavailable)),
        ):
            client.describe()
        assert time.monotonic() - began < 5


def test_match_is_local(session: Session, service: Service) -> None:
    namespace = session.open_namespace(PARTS)
    hashes = chain(namespace, 20)
    assert session.match(namespace, hashes).hits == 0
    store(session, namespace, hashes[:12])
    session.acquire(namespace, 2, hashes[:0]).result(
        5
    )  # in order: whatever was sent before it has been counted
    before = service.stats().counters["messages_total"]
    for _ in range(100):
        found = session.match(namespace, hashes)
    assert found.hits == 12
    assert set(found.tiers.tolist()) == {Tier.HBM}
    assert service.stats().counters["messages_total"] == before


def test_match_answers_while_the_daemon_is_away(tmp_path: Path) -> None:
    with (
        started(small_config(tmp_path)) as service,
        connect(service.socket) as client,
        attach(client, "match") as session,
    ):
        namespace = session.open_namespace(PARTS)
        hashes = chain(namespace, 8)
        store(session, namespace, hashes)
        pid = service.daemon_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert session.match(namespace, hashes).hits == 8
        finally:
            os.kill(pid, signal.SIGCONT)


def test_namespaces_are_opened_once_and_are_apart(session: Session) -> None:
    """Same tokens under another model, dtype, LoRA or salt were served each other's blocks."""
    namespace = session.open_namespace(PARTS)
    assert session.open_namespace(dict(PARTS)) is namespace
    tokens = np.arange(8 * BLOCK_TOKENS)
    store(session, namespace, namespace.chain(tokens).hashes)
    for tag, value in (
        ("model", b"other"),
        ("dtype", b"bfloat16"),
        ("adapter", b"lora-1"),
        ("salt", b"tenant"),
    ):
        other = session.open_namespace({**PARTS, tag: value})
        assert other.handle != namespace.handle
        hashes = other.chain(tokens).hashes
        assert session.match(other, hashes).hits == 0
        assert not (hashes == namespace.chain(tokens).hashes).any()
        # Not even the other's hashes are a hit under this name.
        assert session.match(other, namespace.chain(tokens).hashes).hits == 0
        grant = session.acquire(other, 3, namespace.chain(tokens).hashes).result(30)
        assert set(grant.outcomes.tolist()) == {Outcome.MISS}
        session.step(dropped_hbm=grant.hbm_slots)
    with pytest.raises(InvalidArgument, match="weights"):
        session.open_namespace({"model": b"x"})


def test_a_chain_that_one_message_cannot_name_is_refused_here(session: Session) -> None:
    namespace = session.open_namespace(PARTS)
    hashes = np.zeros((session.max_message_blocks + 1, 2), dtype=np.uint64)
    with pytest.raises(InvalidArgument, match="at most"):
        session.acquire(namespace, 1, hashes)


def test_an_acquire_beyond_the_pool_says_no_slot(session: Session) -> None:
    namespace = session.open_namespace(PARTS)
    grant = session.acquire(namespace, 1, chain(namespace, PAGES + 4))
    outcomes = grant.result(30).outcomes
    assert outcomes[-1] == Outcome.NO_SLOT
    grant.abandon()
    session.step()
    whole = session.acquire(namespace, 2, chain(namespace, PAGES - 2))
    assert set(whole.result(30).outcomes.tolist()) == {Outcome.MISS}
    whole.abandon()


def test_the_tables_are_read_only(session: Session) -> None:
    with pytest.raises(ValueError, match="read-only"):
        session.tables.tables.columns.state[0] = 1


def test_pages_slots_and_addresses_agree(session: Session) -> None:
    namespace = session.open_namespace(PARTS)
    grant = session.acquire(namespace, 1, chain(namespace, 5)).result(30)
    pages = session.hbm.page_of(grant.hbm_slots)
    assert session.hbm.slot_of(pages).tolist() == grant.hbm_slots.tolist()
    base = session.hbm.pages.ctypes.data
    assert session.hbm.address_of(grant.hbm_slots).tolist() == [
        base + int(page) * session.hbm.slot_bytes for page in pages
    ]
    session.hbm.pages[pages[0]] = 7
    assert session.hbm.view(int(grant.hbm_slots[0])).min() == 7
    session.step(dropped_hbm=grant.hbm_slots)


def test_dram_extents_that_come_later_are_mapped(tmp_path: Path) -> None:
    """A grant named a DRAM extent whose descriptor had not arrived: the copy went to a wild address."""
    config = small_config(tmp_path, dram_bytes=64 * MIB, dram_extent_bytes=4 * MIB)
    with (
        started(config) as service,
        connect(service.socket) as client,
        attach(client, "early", room=64) as session,
    ):
        wait_for("every extent", lambda: session.dram.nbytes == 64 * MIB)
        wait_for("room", lambda: session.step() is None and session.room_in_hand >= 32)
        room = session.take_room(32)
        assert room is not None
        assert session.dram.mapped(room.slots)
        addresses = session.dram.address_of(room.slots)
        assert len(set(addresses.tolist())) == 32
        session.dram.view(int(room.slots[0]))[:] = 1


def test_a_session_without_hbm(client: Client) -> None:
    with client.attach("no hbm", geometry(), None) as session:
        namespace = session.open_namespace(PARTS)
        with pytest.raises(FailedPrecondition):
            _ = session.hbm
        assert session.acquire(namespace, 1, chain(namespace, 4)).result(30).outcomes.tolist() == [0, 0, 0, 0]


def test_too_many_sessions_are_refused(service: Service, client: Client) -> None:
    sessions: list[Session] = []
    try:
        for i in range(20):
            try:
                sessions.append(attach(client, f"s{i}"))
            except ResourceExhausted:
                break
        assert 1 <= len(sessions) <= service.config.max_sessions
    finally:
        for session in sessions:
            session.close()
    attach(client, "again").close()


def test_what_was_staged_is_told_before_the_session_ends(service: Service, client: Client) -> None:
    """The last copies of a worker that ended in order were lost: its detach overtook them."""
    for i in range(5):
        session = attach(client, f"last words {i}")
        namespace = session.open_namespace(PARTS)
        hashes = chain(namespace, 4)
        grant = session.acquire(namespace, 1, hashes).result(30)
        session.stage(seals=seals_of(namespace, hashes, grant.hbm_slots, grant.hbm_generations))
        session.close()
        with attach(client, "reader") as reader:
            assert reader.match(reader.open_namespace(PARTS), hashes).hits == 4


def test_what_is_released_behind_a_seal_is_drained_too(
    session: Session, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of a store were released only after `drain`: a clear on another connection came first and kept them."""
    plain = session._state.next_message

    def slow(stream: int) -> object:
        message = plain(stream)
        if message is not None and message.step.released_hbm:
            time.sleep(0.2)
        return message

    monkeypatch.setattr(session._state, "next_message", slow)
    namespace = session.open_namespace(PARTS)
    hashes = chain(namespace, 6)
    grant = session.acquire(namespace, 1, hashes).result(30)
    seals = seals_of(namespace, hashes, grant.hbm_slots, grant.hbm_generations)
    session.stage(seals=seals, dropped_hbm=grant.hbm_slots)
    assert session.drain(30)
    mine = next(one for one in service.stats().sessions if one.name == session.name)
    assert (session.match(namespace, hashes).hits, mine.held_hbm_slots) == (6, 0)


def test_close_is_idempotent_and_frees_everything(service: Service, client: Client) -> None:
    session = attach(client, "closed", credit=8, room=8)
    namespace = session.open_namespace(PARTS)
    session.acquire(namespace, 1, chain(namespace, 5)).result(30)
    session.close()
    session.close()
    assert "closed" not in [s.name for s in service.stats().sessions]
    tiers = {tier.tier: tier for tier in service.stats().tiers}
    assert tiers["hbm"].filling_slots == tiers["dram"].filling_slots == 0
    assert service.faults() == []


def test_a_wrong_protocol_version_is_refused(client: Client) -> None:
    from kvstore.wire.v1 import kvstore_pb2 as pb

    with pytest.raises(KvstoreError, match="version"):
        client.call("Attach", pb.AttachRequest(protocol_version=99))


def test_a_restart_while_nobody_waits_is_survived(tmp_path: Path) -> None:
    with (
        started(small_config(tmp_path)) as service,
        connect(service.socket) as client,
        attach(client, "idle", credit=4, room=4) as session,
    ):
        namespace = session.open_namespace(PARTS)
        hashes = chain(namespace, 6)
        store(session, namespace, hashes)
        held = session.acquire(namespace, 2, hashes).result(30)
        for _ in range(3):
            service.kill_daemon()
        wait_for("the stream", lambda: session.connected)
        again = session.acquire(namespace, 3, hashes).result(30)
        assert again.hbm_slots.tolist() == held.hbm_slots.tolist()
        assert set(again.outcomes.tolist()) == {Outcome.HIT_HBM}
        assert session.poll() is not None
        session.step(dropped_hbm=held.hbm_slots)
        session.step(dropped_hbm=again.hbm_slots)
        wait_for("the release", lambda: service.stats().sessions[0].held_hbm_slots == session.credit_in_hand)
        assert service.faults() == []


def test_a_lost_descriptor_connection_is_presented_again(tmp_path: Path) -> None:
    with (
        started(small_config(tmp_path)) as service,
        connect(service.socket) as client,
        attach(client, "lost") as session,
    ):
        namespace = session.open_namespace(PARTS)
        hashes = chain(namespace, 6)
        store(session, namespace, hashes)
        connection = session._attachment._descriptors._socket
        assert connection is not None
        connection.shutdown(socket.SHUT_RDWR)  # as if the keeper and the daemon had both lost their ends
        wait_for("its end", lambda: session._attachment._descriptors.closed)
        service.kill_daemon()
        wait_for("the stream", lambda: session.connected)
        grant = session.acquire(namespace, 2, hashes)
        assert set(grant.result(20).outcomes.tolist()) == {Outcome.HIT_HBM}
        assert not session._attachment._descriptors.closed
        grant.abandon()


def test_eight_threads_of_one_process_may_use_eight_sessions(service: Service) -> None:
    import threading

    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            with connect(service.socket) as client, attach(client, f"t{number}") as session:
                namespace = session.open_namespace(PARTS)
                for _ in range(20):
                    grant = session.acquire(namespace, number, chain(namespace, 3))
                    grant.result(20)
                    grant.abandon()
                    session.step()
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert service.faults() == []


def test_an_opening_that_fails_leaves_nothing_mapped(service: Service, client: Client) -> None:
    """Each failed attempt to attach kept the DRAM that it had mapped, and pinned, until the process ended."""

    def maps() -> int:
        return sum("kvstore-dram" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = maps()
    too_much = DeviceSpec(hbm_bytes=1 << 50)
    for _ in range(3):
        with pytest.raises(KvstoreError):
            client.attach("too much", geometry(), too_much)
    assert maps() == before
    wait_for("no session", lambda: not service.stats().sessions)
