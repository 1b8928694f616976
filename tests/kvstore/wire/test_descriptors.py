"""The descriptor socket's messages: every kind there and back, descriptors carried, malformed packets refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstore.errors import InvalidArgument
from kvstore.wire import descriptors as wire

MESSAGES: list[wire.Message] = [
    wire.Hello(token=b"0123456789abcdef", member=3),
    wire.Tables(nbytes=1 << 40),
    wire.Extent(tier=2, device=1, extent=65535, nbytes=1 << 33, slot_base=7, slots=9, slot_bytes=1 << 20),
    wire.Ready(),
    wire.NewHbm(nbytes=1 << 33, slots=8192, slot_bytes=1 << 20),
    wire.Accepted(extent=12, slot_base=4096, slots=8192),
    wire.Refused(text="no such session"),
    wire.Dropped(tier=1, extent=4),
    wire.NewPlainHbm(nbytes=1 << 33, slots=8192, slot_bytes=1 << 20),
    wire.Distrust(extent=65535),
    wire.Wanted(nbytes=1 << 32, slots=8192, slot_bytes=1 << 19),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: wire.Message) -> None:
    assert wire.parse(wire.pack(message)) == message


def test_a_descriptor_travels_along(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    fd = os.memfd_create("test")
    os.write(fd, b"hello")
    wire.send(left, wire.Tables(nbytes=5), [fd])
    received = wire.receive(right)
    assert received is not None
    assert received.message == wire.Tables(nbytes=5)
    (copy,) = received.fds
    assert os.pread(copy, 5, 0) == b"hello"
    assert os.get_inheritable(copy) is False
    received.close()
    os.close(fd)


def test_the_end_of_the_connection_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.close()
    assert wire.receive(right) is None


def test_a_long_refusal_is_cut_to_a_packet() -> None:
    packet = wire.pack(wire.Refused(text="x" * 10_000))
    assert len(packet) <= wire.MAX_PACKET_BYTES


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"HTTP/1.1 200 OK",
        wire.pack(wire.Ready())[:4] + b"\x63\x00\x04\x00",
        wire.pack(wire.Ready())[:6] + b"\x63\x00",
        wire.pack(MESSAGES[0])[:-1],
        wire.pack(MESSAGES[2]) + b"\x00",
    ],
    ids=["short", "foreign", "version", "kind", "cut", "long"],
)
def test_a_malformed_packet_is_refused(packet: bytes) -> None:
    with pytest.raises(InvalidArgument):
        wire.parse(packet)


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_of_a_malformed_packet_do_not_leak(pair: tuple[socket.socket, socket.socket]) -> None:
    """Elsewhere a garbage packet with descriptors attached left them open in the server for ever."""
    left, right = pair
    before = _open_fds()
    fd = os.memfd_create("test")
    socket.send_fds(left, [b"garbage!"], [fd])
    socket.send_fds(left, [wire.pack(wire.Ready())], [fd, fd, fd, fd])
    os.close(fd)
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            wire.receive(right)
    assert _open_fds() == before
