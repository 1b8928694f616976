"""Opening a session: what Attach and the descriptor socket refuse, and what becomes of half-opened sessions."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstore.config import Limits
from kvstore.layout import Tier
from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient, attach_request, namespace_parts

Make = Callable[[], RawClient]
GROUP = pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=1, kv_heads=1, head_dim=8, block_tokens=4)


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    """The status that a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda request: setattr(request, "protocol_version", 2), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: request.groups.append(GROUP), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: request.ClearField("groups"), grpc.StatusCode.INVALID_ARGUMENT),
        (
            lambda request: setattr(request.groups[0], "rule", pb.HIT_RULE_TRAILING),
            grpc.StatusCode.UNIMPLEMENTED,
        ),
        (lambda request: setattr(request.groups[0], "rule", 0), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request.groups[0], "head_dim", 0), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request, "dtype", "int3"), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request, "members", 65), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request, "name", "x" * 129), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request.device, "index", 7), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda request: setattr(request.resume, "token", bytes(16)), grpc.StatusCode.NOT_FOUND),
        (lambda request: setattr(request.resume, "token", bytes(3)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=[
        "version",
        "groups",
        "no group",
        "rule",
        "no rule",
        "shape",
        "dtype",
        "members",
        "name",
        "device",
        "token",
        "short",
    ],
)
def test_a_bad_attach_is_refused(
    client: Make, change: Callable[[pb.AttachRequest], None], code: grpc.StatusCode
) -> None:
    request = attach_request()
    change(request)
    stub = client().stub
    assert code_of(lambda: stub.Attach(request, timeout=30)) is code


def test_a_resume_with_odd_arrays_is_refused(client: Make) -> None:
    one = client().begin()
    for resume in (
        pb.Resume(token=one.token, hbm_slots=bytes(4)),
        pb.Resume(token=one.token, dram_slots=bytes(3), dram_generations=bytes(3)),
    ):
        request = attach_request(resume=resume)
        code = code_of(lambda request=request: one.stub.Attach(request, timeout=30))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_namespace_needs_its_parts_once(client: Make) -> None:
    one = client().begin()
    parts = namespace_parts()
    for bad in (parts[1:], [*parts, parts[0]], [*parts, pb.NamespacePart(tag="colour", value=b"red")]):
        request = pb.OpenNamespaceRequest(token=one.token, parts=bad)
        code = code_of(lambda request=request: one.stub.OpenNamespace(request, timeout=30))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert one.namespace() == one.namespace()


def test_tokens_are_checked_by_every_call(client: Make) -> None:
    one = client().begin()
    for token in (bytes(16), b"", one.token[:8]):
        for call, request in (
            (one.stub.Detach, pb.DetachRequest(token=token)),
            (one.stub.OpenNamespace, pb.OpenNamespaceRequest(token=token, parts=namespace_parts())),
            (one.stub.Explain, pb.ExplainRequest(token=token)),
        ):
            code = code_of(lambda call=call, request=request: call(request, timeout=30))  # type: ignore[misc]
            assert code is grpc.StatusCode.UNAUTHENTICATED


def test_hello_gives_tables_and_memory(client: Make, service: Service) -> None:
    one = client()
    one.attach()
    wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == 64 << 20)
    kinds = [type(message).__name__ for message in one.hello()]
    assert kinds == ["Tables", "Extent", "Extent", "Extent", "Extent", "Ready"]
    assert one.columns is not None
    assert not one.columns.state.flags.writeable
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(next(iter(one.dram_fds.values())), 4096)


@pytest.mark.parametrize("member", [1, 2**32 - 1])
def test_a_member_that_was_not_announced_is_refused(client: Make, member: int) -> None:
    one = client()
    one.attach()
    assert isinstance(one.hello(member=member)[-1], wire.Refused)
    assert isinstance(one.hello()[-1], wire.Ready), "a refusal leaves the session as it was"


def test_a_foreign_token_gets_no_descriptor(client: Make) -> None:
    """Elsewhere whoever reached the socket was handed the memory."""
    one = client()
    one.attach()
    messages = one.hello(token=bytes(16))
    assert [type(message) for message in messages] == [wire.Refused]
    assert one.receive_descriptor() is None, "the connection is closed"


def test_a_member_presents_itself_once(client: Make) -> None:
    one = client().begin()
    first = one.connection
    assert isinstance(one.hello()[-1], wire.Refused)
    assert first is not None
    one.connection = first
    assert isinstance(one.give_hbm(4), wire.Accepted), "the first connection is still the member's"


def test_a_member_whose_connection_broke_may_come_back(client: Make, service: Service) -> None:
    one = client().begin()
    assert one.connection is not None
    one.connection.close()
    wait_for("ready again", lambda: isinstance(one.hello()[-1], wire.Ready))
    assert service.stats().sessions[0].state == "attached"


def test_something_that_is_no_pidfd_is_refused(client: Make) -> None:
    """A process that passes a plain file could never be seen to die."""
    one = client()
    one.attach()
    with one.dial() as connection:
        fd = os.memfd_create("no-pidfd")
        wire.send(connection, wire.Hello(token=one.token, member=0), [fd])
        os.close(fd)
        received = wire.receive(connection)
        assert received is not None
        assert isinstance(received.message, wire.Refused)


@pytest.mark.parametrize("packet", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"KVFD" + bytes(500)])
def test_garbage_disconnects_a_stranger(client: Make, packet: bytes) -> None:
    one = client()
    with one.dial() as connection:
        connection.send(packet)
        while True:
            try:
                if not connection.recv(1000):
                    break
            except ConnectionError:
                break
    assert one.begin()


def test_garbage_from_a_member_is_refused_and_the_member_stays(client: Make, service: Service) -> None:
    one = client().begin()
    assert one.connection is not None
    one.connection.send(b"garbage")
    assert isinstance(one.receive_descriptor(), wire.Refused)
    assert isinstance(one.give_hbm(4), wire.Accepted)


def test_a_flood_of_garbage_is_not_answered_without_end(client: Make, service: Service) -> None:
    """A member that sent garbage and read nothing had a refusal queued, and a line logged, for every packet."""
    one = client().begin()
    assert one.connection is not None
    refused, logged = (
        service.stats().counters["descriptor_refusals_total"],
        service.log.read_text().count("refused"),
    )
    one.connection.setblocking(False)
    sent = 0
    until_s = time.monotonic() + DEADLINE_S
    while sent < 2000 and time.monotonic() < until_s:
        try:
            one.connection.send(b"garbage")
            sent += 1
        except BlockingIOError:
            time.sleep(0.001)
    one.connection.settimeout(DEADLINE_S)
    wait_for("all", lambda: service.stats().counters["descriptor_refusals_total"] - refused == sent == 2000)
    assert service.log.read_text().count("refused") - logged <= 5 * 4, "five lines in ten seconds"
    answers = 0
    one.connection.settimeout(2.0)
    with contextlib.suppress(TimeoutError):
        while isinstance(one.receive_descriptor(), wire.Refused):
            answers += 1
    assert 0 < answers < 1000
    one.connection.settimeout(DEADLINE_S)
    assert isinstance(one.give_hbm(4), wire.Accepted), "the member is as good as before"


@pytest.mark.parametrize(
    "fd_bytes, message",
    [
        (0, wire.NewHbm(nbytes=4 * SLOT_BYTES, slots=4, slot_bytes=SLOT_BYTES)),
        (2 * SLOT_BYTES, wire.NewHbm(nbytes=4 * SLOT_BYTES, slots=4, slot_bytes=SLOT_BYTES)),
        (4 * SLOT_BYTES, wire.NewHbm(nbytes=4 * SLOT_BYTES, slots=3, slot_bytes=SLOT_BYTES)),
        (4 * SLOT_BYTES, wire.NewHbm(nbytes=4 * SLOT_BYTES, slots=8, slot_bytes=SLOT_BYTES // 2)),
        (4 * SLOT_BYTES, wire.NewHbm(nbytes=0, slots=0, slot_bytes=SLOT_BYTES)),
    ],
    ids=["unsealed", "short", "slots", "class", "empty"],
)
def test_bad_hbm_is_refused(client: Make, fd_bytes: int, message: wire.NewHbm) -> None:
    """An extent that could be cut short later would kill the daemon or its neighbours by SIGBUS."""
    from tiers.memfd import create_memfd

    one = client().begin(hbm_slots=0)
    assert one.connection is not None
    fd = create_memfd("bad", fd_bytes) if fd_bytes else os.memfd_create("bad")
    if not fd_bytes:
        os.truncate(fd, 4 * SLOT_BYTES)
    before = one.stub.Stats(pb.StatsRequest(), timeout=30).tiers[0].allocated_bytes
    wire.send(one.connection, message, [fd])
    os.close(fd)
    assert isinstance(one.receive_descriptor(), wire.Refused)
    assert one.stub.Stats(pb.StatsRequest(), timeout=30).tiers[0].allocated_bytes == before


def test_hbm_beyond_the_devices_bound_is_refused(client: Make, service: Service) -> None:
    one = client().begin()
    over = service.config.hbm_bytes // SLOT_BYTES + 1
    assert isinstance(one.give_hbm(over), wire.Refused)


def test_a_second_session_is_sent_the_hbm_of_the_first(client: Make) -> None:
    one, other = client().begin(), client().begin()
    assert set(other.hbm) == set(one.hbm)
    answer = one.give_hbm(8)
    assert isinstance(answer, wire.Accepted)
    pushed = other.receive_descriptor()
    assert isinstance(pushed, wire.Extent)
    assert (pushed.extent, pushed.tier) == (answer.extent, Tier.HBM)


def test_strangers_who_say_nothing_do_not_keep_others_out(client: Make, service: Service) -> None:
    idle = []
    for _ in range(70):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(10)
        connection.connect(wire.descriptor_path(service.socket))
        idle.append(connection)
    try:
        assert idle[-1].recv(1) == b"", "beyond 64 a stranger is disconnected"
        idle[0].close()
        one = client()
        one.attach()
        wait_for("a place", lambda: one.hello()[-1:] and True)
    finally:
        for connection in idle:
            connection.close()


def test_sessions_are_bounded(client: Make, service: Service) -> None:
    made = [client() for _ in range(service.config.max_sessions)]
    for one in made:
        one.attach()
    code = code_of(client().attach)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_session_whose_members_never_come_is_dropped() -> None:
    """Elsewhere a client that crashed while it attached kept its place for ever."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = replace(small_config(Path(name)), limits=Limits(session_lost_s=2.0))
        with started(config) as service:
            one = RawClient(service.socket)
            one.attach()
            assert len(service.stats().sessions) == 1
            wait_for("the end of the session", lambda: not service.stats().sessions)
            assert service.faults() == []
            one.close()
