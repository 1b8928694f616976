"""What a peer of the stream socket may do that no RPC can: say nonsense, stop in the middle, read nothing."""

from __future__ import annotations

import contextlib
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.identity import HashChain
from kvstore.wire.frames import frame, pack_hello, stream_path
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
from tests.support.raw_client import RawClient

Make = Callable[[], RawClient]


@contextlib.contextmanager
def peer(service: Service) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(stream_path(service.socket))
        yield sock


def ending(sock: socket.socket) -> pb.StreamError:
    """The one error that comes before the end of the connection."""
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    length = int.from_bytes(data[:4], "little")
    assert len(data) == 4 + length, "one frame, and then the end"
    return pb.ServerMessage.FromString(data[4:]).error


def test_nobody_else_may_connect(service: Service) -> None:
    assert stat.S_IMODE(Path(stream_path(service.socket)).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "hello", [bytes(28), b"KVSTREAM" + bytes(20), b"GET / HTTP/1.1\r\nHost: localhost\r\n"]
)
def test_who_does_not_speak_the_protocol_is_told_so(service: Service, hello: bytes) -> None:
    with peer(service) as sock:
        sock.sendall(hello)
        assert "stream" in ending(sock).message


def test_who_says_nothing_is_disconnected(service: Service) -> None:
    """A connection without a hello held a place for ever."""
    with peer(service) as sock:
        sock.sendall(b"KVS")
        assert sock.recv(1) == b""


def test_what_comes_right_behind_the_hello_is_not_lost(client: Make, service: Service) -> None:
    one = client()
    one.attach()
    one.hello()
    ns = one.namespace()
    acquire = pb.Acquire(namespace=ns.namespace, lease=1)
    with peer(service) as sock:
        packed = pack_hello(one.token) + frame(pb.ClientMessage(id=1, acquire=acquire).SerializeToString())
        for at in range(0, len(packed), 7):  # in pieces that end anywhere
            sock.sendall(packed[at : at + 7])
        length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
        assert pb.ServerMessage.FromString(sock.recv(length, socket.MSG_WAITALL)).grant.id == 1


@pytest.mark.parametrize("packed", [frame(b"\xff" * 9), (1 << 30).to_bytes(4, "little")])
def test_a_frame_that_is_no_message_ends_the_stream(client: Make, service: Service, packed: bytes) -> None:
    one = client()
    one.attach()
    one.hello()
    with peer(service) as sock:
        sock.sendall(pack_hello(one.token) + packed)
        assert ending(sock).message
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")


def test_a_peer_that_reads_nothing_loses_its_stream_only(client: Make, service: Service) -> None:
    """Elsewhere answers for a client that had stopped reading grew in the server's memory without end."""
    one = client()
    one.attach()
    one.hello()
    ns = one.namespace()
    hashes = one_chain(ns.key).tobytes()
    before = service.stats().counters["streams_overflowed_total"]
    with peer(service) as sock:
        sock.sendall(pack_hello(one.token))
        until = time.monotonic() + 60
        number = 0
        with contextlib.suppress(OSError):  # once the daemon has ended it
            while time.monotonic() < until:
                number += 1
                body = pb.Acquire(namespace=ns.namespace, lease=number, hashes=hashes)
                sock.sendall(frame(pb.ClientMessage(id=number, acquire=body).SerializeToString()))
    wait_for("a count", lambda: service.stats().counters["streams_overflowed_total"] == before + 1)
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")
    other = client().begin(hbm_slots=0)
    assert other.acquire(other.chain(range(20))).outcomes


def one_chain(key: bytes) -> NDArray[np.uint64]:
    """A long one: its answer is large."""

    return HashChain(key, 4, range(200_000)).hashes
