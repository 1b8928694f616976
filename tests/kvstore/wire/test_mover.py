"""The messages between daemon and mover: what is packed is parsed, and nothing else is."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from kvstore.errors import InvalidArgument
from kvstore.layout import Tier
from kvstore.wire import mover as wire
from kvstore.wire.packed import MOVE, REPLY

MESSAGES = [
    wire.Config(
        directory="/a b/ü", threads=3, direct=False, write_bytes_per_s=7, read_operations_per_s=9, nice=1
    ),
    wire.Extent(extent=65535, nbytes=1 << 40),
    wire.Limit(slabs_bytes=1 << 50),
    wire.Slab(extent=1, number=1 << 31, nbytes=1 << 41, slot_bytes=1 << 33),
    wire.Slab(extent=1, number=1, nbytes=1 << 20, slot_bytes=4096, filled=True),
    wire.Drop(tier=Tier.NVME, extent=9),
    wire.Sync(id=1 << 63),
    wire.Ready(threads=8),
    wire.SlabOpened(extent=4, number=1 << 31, direct=True),
    wire.SlabFailed(extent=4, number=7, text="no space", exists=True),
    wire.SlabLost(extent=65535, number=1 << 31),
    wire.Synced(id=3, text="fdatasync failed"),
    wire.Notice(text="ü"),
    wire.Counts(
        read_blocks=1,
        read_bytes=2,
        written_blocks=3,
        written_bytes=4,
        corrupt_blocks=5,
        failed_blocks=6,
        syncs=7,
        busy_s=8.5,
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_packed_is_parsed(message: wire.Message) -> None:
    assert wire.parse(wire.pack(message)) == message


def test_batches() -> None:
    moves = np.zeros(wire.MAX_BATCH_MOVES, dtype=MOVE)
    moves["id"] = np.arange(len(moves))
    packet = wire.pack(wire.Moves(moves))
    assert len(packet) == wire.MAX_PACKET_BYTES
    parsed = wire.parse(packet)
    assert isinstance(parsed, wire.Moves)
    assert np.array_equal(parsed.moves, moves)
    replies = wire.parse(wire.pack(wire.Replies(np.zeros(3, dtype=REPLY))))
    assert isinstance(replies, wire.Replies)
    assert len(replies.replies) == 3
    for count in (0, wire.MAX_BATCH_MOVES + 1):
        with pytest.raises(InvalidArgument):
            wire.pack(wire.Moves(np.zeros(count, dtype=MOVE)))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\1\0",
        b"\1\0\0\0",
        b"\1\0\0\0{}",
        b'\1\0\0\0{"directory": "/", "shell": 1}',
        b"\2\0\0\0xx",
        b"\4\0\0\0\x09\0\0\0",
        b"\5\0\0\0" + bytes(5),
        b"\x63\0\0\0",
        b"\x0f\0\0\0",
    ],
)
def test_anything_else_is_refused(packet: bytes) -> None:
    with pytest.raises(InvalidArgument):
        wire.parse(packet)


def test_a_descriptor_travels_and_the_end_is_empty() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.memfd_create("x")
    wire.send_packet(ours, b"abc", fd)
    wire.send_packet(ours, b"d")
    packet, got = wire.receive_packet(theirs)
    assert packet == b"abc"
    assert got is not None
    assert os.fstat(got).st_ino == os.fstat(fd).st_ino
    assert wire.receive_packet(theirs) == (b"d", None)
    ours.close()
    assert wire.receive_packet(theirs) == (b"", None)
    theirs.close()
    os.close(fd)
    os.close(got)


def test_a_packet_too_long_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(bytes(wire.MAX_PACKET_BYTES + 1))
        with pytest.raises(InvalidArgument):
            wire.receive_packet(theirs)
