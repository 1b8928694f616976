"""What the processes of a group say to each other: there and back, and what is malformed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from engine_adapter.copying.copier import Direction
from engine_adapter.group import link
from kvstore.errors import InvalidArgument


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


@pytest.mark.parametrize(
    "message",
    [
        link.Join(path="/run/kv.sock.fd", token="00ff" * 8, slot_bytes=1 << 22, device=3),
        link.Map(pages=(1 << 32) - 1),
        link.Computing(steps=2),
        link.Opened(uuid="GPU-1", identity="cuda GPU-1 boot 13000"),
        link.Mapped(),
        link.Copied(number=(1 << 64) - 1),
        link.Failed(text="no memory"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_comes_as_it_was(
    pair: tuple[socket.socket, socket.socket], message: link.LinkMessage
) -> None:
    link.send(pair[0], message)
    assert link.receive(pair[1]) == message


def test_the_largest_copy_fits_a_packet(pair: tuple[socket.socket, socket.socket]) -> None:
    hbm = np.arange(link.MAX_COPY_BLOCKS, dtype=np.uint32)
    copy = link.Copy(number=7, direction=Direction.STORE, hbm_slots=hbm, dram_slots=hbm[::-1])
    link.send(pair[0], copy)
    came = link.receive(pair[1])
    assert isinstance(came, link.Copy)
    assert (came.number, came.direction) == (7, Direction.STORE)
    assert np.array_equal(came.hbm_slots, hbm)
    assert np.array_equal(came.dram_slots, hbm[::-1])


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(link.Join(path="p", token="secret", slot_bytes=1, device=0))


def test_the_end_of_the_other_process_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert link.receive(pair[1]) is None


@pytest.mark.parametrize(
    "packet",
    [
        b"\x01",
        b"\xff\0\0\0",
        b"\x01\0\0\0{",
        b"\x01\0\0\0{}",
        b"\x03\0\0\0" + bytes(12),
        b"\x03\0\0\0" + bytes(12) + b"\x03\0\0\0" + bytes(20),
    ],
)
def test_what_send_does_not_make_is_refused(pair: tuple[socket.socket, socket.socket], packet: bytes) -> None:
    pair[0].send(packet)
    with pytest.raises(InvalidArgument, match="malformed"):
        link.receive(pair[1])
