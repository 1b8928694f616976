"""Sessions that say anything on their stream beside one that must stay correct, and bytes that are no stream at all."""

from __future__ import annotations

import array
import contextlib
import os
import queue
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.wire import descriptors
from kvstore.wire.frames import frame, pack_hello, stream_path
from kvstore.wire.packed import COPY, SEAL
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.fuzz.rig import Known, Target, examples, messages, mutations, packed_messages
from tests.support.raw_client import Granted, RawClient
from tiers.memfd import create_memfd

ANSWER_S = 30.0
TRANSPORTS = pytest.mark.parametrize("transport", ["rpc", "frames"])


def test_nothing_a_stream_says_touches_another_session(target: Target) -> None:
    """Out of order, stale, foreign, malformed: refused one by one, and what another session holds stays as it is."""
    with target.attacked(hbm_slots=32) as victim:
        hashes, granted = victim.fill(range(40))
        room = victim.write_through(hashes)

        @examples(40)
        @given(data=st.data(), transport=st.sampled_from(["rpc", "frames"]))
        def attack(data: st.DataObject, transport: Literal["rpc", "frames"]) -> None:
            with target.attacked(transport, hbm_slots=0, verifies=True) as attacker:
                mine, own = attacker.fill(range(500, 516))
                known = everything(victim, hashes, granted, attacker, mine, own)
                bodies = data.draw(
                    st.lists(messages(pb.ClientMessage, known) | plausible(known, attacker), max_size=8),
                    label="said",
                )
                for message in bodies:
                    # An answer about id 0 would be, to the client of frames, the end of the stream.
                    message.id = message.id or 1
                    attacker.send_raw(message)
                drained(attacker)
                target.check()
            again = victim.acquire(hashes, lease=5)
            assert again.outcomes == [pb.OUTCOME_HIT_HBM] * len(hashes)
            assert again.hbm.tolist() == granted.hbm.tolist()
            assert again.hbm_generations.tolist() == granted.hbm_generations.tolist()

        attack()
        assert victim.columns is not None
        assert len({slot for slot, _ in room}) == len(hashes)


def everything(
    victim: RawClient, hashes: Any, granted: Granted, attacker: RawClient, mine: Any, own: Granted
) -> Known:
    """Slots, generations and hashes of both, as single numbers and as packed records that nearly fit."""
    assert victim.attached is not None
    assert attacker.attached is not None
    slots = [*granted.hbm.tolist()[:3], *own.hbm.tolist()[:3]]
    generations = [*granted.hbm_generations.tolist()[:2], *own.hbm_generations.tolist()[:2]]
    foreign, ours = victim.seals(hashes, granted), attacker.seals(mine, own)
    stolen = foreign.copy()
    stolen["namespace"] = attacker.ns.namespace
    copies = np.zeros(3, dtype=COPY)
    copies["source"], copies["source_generation"] = granted.hbm[:3], granted.hbm_generations[:3]
    copies["target"], copies["target_generation"] = own.hbm[:3], own.hbm_generations[:3]
    packed = [foreign, ours, stolen, copies, copies[:1]]
    return Known(
        numbers=[
            *slots,
            *generations,
            attacker.ns.namespace,
            victim.ns.namespace,
            victim.attached.session,
            5,
            77,
        ],
        bytes=[
            *(records.tobytes() for records in packed),
            hashes.tobytes(),
            mine.tobytes(),
            granted.hbm.astype("<u4").tobytes(),
            own.hbm.astype("<u4").tobytes(),
            victim.token,
        ],
    )


def plausible(known: Known, attacker: RawClient) -> st.SearchStrategy[pb.ClientMessage]:
    """A message that is taken: in order, in the attacker's own namespace, with whole records."""
    ids = st.integers(attacker.next_id, attacker.next_id + 40)
    namespace = st.just(attacker.ns.namespace)
    chains = st.sampled_from([item for item in known.bytes if len(item) % 16 == 0])
    acquires = st.builds(
        pb.Acquire,
        namespace=namespace,
        lease=st.integers(0, 3),
        hashes=chains,
        first=st.integers(0, 12),
        reserve_slots=st.integers(0, 40),
        private_fill=st.booleans(),
    )
    copies = st.sampled_from([b"", *(item for item in known.bytes if len(item) % COPY.itemsize == 0)])
    steps = st.builds(
        pb.Step,
        seals=st.sampled_from([b"", *(item for item in known.bytes if len(item) % SEAL.itemsize == 0)]),
        loads=copies,
        stores=copies,
        store_checksums=copies,  # as long as stores are
        wrong_loads=copies,
        released_hbm=st.sampled_from([b"", *(item for item in known.bytes if len(item) % 4 == 0)]),
        released_dram=st.sampled_from([b"", *(item for item in known.bytes if len(item) % 4 == 0)]),
        seen=st.integers(0, 1 << 63),
        want_slots=st.integers(0, 1 << 31),
        want_room=st.integers(0, 1 << 31),
    )
    prefetches = st.builds(
        pb.Prefetch,
        namespace=namespace,
        lease=st.integers(0, 3),
        hashes=chains,
        deadline_ms=st.integers(0, 1 << 31),
    )
    return st.one_of(
        st.builds(pb.ClientMessage, id=ids, acquire=acquires),
        st.builds(pb.ClientMessage, id=ids, step=steps),
        st.builds(pb.ClientMessage, id=ids, prefetch=prefetches),
        st.builds(pb.ClientMessage, id=ids, cancel=st.builds(pb.Cancel, lease=st.integers(0, 3))),
    )


def drained(client: RawClient) -> None:
    """Everything that was said has been answered, whatever the last id was: the stream still takes a message."""
    client.next_id = (1 << 64) - 1
    last = client.send(cancel=pb.Cancel(lease=1))
    client.send_raw(
        pb.ClientMessage(id=1, cancel=pb.Cancel(lease=1))
    )  # refused, as a sign that all before is done
    until = time.monotonic() + ANSWER_S
    while True:
        message = client.receive(timeout_s=max(0.1, until - time.monotonic()))
        if message.WhichOneof("body") == "error":
            assert message.error.code in ANSWERS, message.error
            if message.error.id == 1 and last:
                return


ANSWERS = {
    code.value[0]
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    )
}


@TRANSPORTS
def test_bytes_that_are_no_message_end_their_own_stream(target: Target, transport: str) -> None:
    """A malformed message of a stream ended it without a reason, or as UNKNOWN."""
    with target.attacked("rpc", hbm_slots=32) as victim:
        hashes, _ = victim.fill(range(40))

        @examples(25)
        @given(packed=packed_messages(pb.ClientMessage, Known(bytes=[hashes.tobytes()])))
        def attack(packed: bytes) -> None:
            with target.attacked(hbm_slots=0) as attacker:
                attacker.drop_stream()
                with contextlib.suppress(grpc.RpcError, EOFError, queue.Empty):
                    attacker.receive(timeout_s=5)
                attacker.resume()
                if transport == "frames":
                    over_frames(target, attacker, packed)
                else:
                    over_rpc(target, attacker, packed)
                target.check()
            assert victim.acquire(hashes, lease=9).outcomes == [pb.OUTCOME_HIT_HBM] * len(hashes)

        attack()


def over_rpc(target: Target, attacker: RawClient, packed: bytes) -> None:
    fence = pb.ClientMessage(id=0, cancel=pb.Cancel(lease=1)).SerializeToString()
    with target.channel as channel:
        call = channel.stream_stream("/kvstore.v1.Kvstore/Session")(
            iter([packed, fence]), timeout=ANSWER_S, metadata=(("kvstore-token-bin", attacker.token),)
        )
        target.code_of(lambda: list(call))


def over_frames(target: Target, attacker: RawClient, packed: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(stream_path(target.service.socket))
        sock.sendall(pack_hello(attacker.token) + frame(packed))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


@examples(60)
@given(data=st.data())
def test_any_bytes_on_the_stream_socket(target: Target, data: st.DataObject) -> None:
    """Nonsense, hellos with any token, frames of any length: an error or the end, never a hang."""
    hello = st.just(pack_hello(bytes(16)))
    said = data.draw(st.binary(max_size=200) | mutations(hello) | hello, label="said")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(stream_path(target.service.socket))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    target.check()


NEW_HBM = descriptors.pack(descriptors.NewHbm(nbytes=1 << 20, slots=64, slot_bytes=16384))
PACKETS = [
    NEW_HBM,
    descriptors.pack(descriptors.NewPlainHbm(nbytes=1 << 20, slots=64, slot_bytes=16384)),
    descriptors.pack(descriptors.Distrust(extent=0)),
    descriptors.pack(descriptors.Distrust(extent=65535)),
    descriptors.pack(descriptors.Refused(text="no")),
    descriptors.pack(descriptors.Wanted(nbytes=1 << 20, slots=64, slot_bytes=16384)),
    descriptors.pack(descriptors.Tables(nbytes=1 << 40)),
    descriptors.pack(descriptors.Dropped(tier=0, extent=0)),
    descriptors.pack(descriptors.Ready()),
]


def test_any_packet_on_the_descriptor_socket(target: Target) -> None:
    """Strangers and members that send anything, with memory, pipes or nothing attached: refused, and nothing leaks."""
    before = open_descriptors(target)
    with target.attacked(hbm_slots=32) as victim:
        hashes, granted = victim.fill(range(40))

        @examples(60)
        @given(
            packets=st.lists(
                st.tuples(
                    st.sampled_from(PACKETS)
                    | mutations(st.sampled_from([*PACKETS, hello_of(victim)]))
                    | st.binary(max_size=600),
                    st.sampled_from(["none", "memory", "small", "pipe", "many"]),
                ),
                max_size=5,
            ),
            member=st.booleans(),
        )
        def attack(packets: Sequence[tuple[bytes, str]], member: bool) -> None:
            with target.attacked(hbm_slots=0) if member else contextlib.nullcontext() as attacker:
                if attacker is None:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                        sock.connect(descriptors.descriptor_path(target.service.socket))
                        throw(sock, packets)
                else:
                    assert attacker.connection is not None
                    throw(attacker.connection, packets)
                target.check()
            again = victim.acquire(hashes, lease=5)
            assert again.hbm.tolist() == granted.hbm.tolist()

        attack()
    target.service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    until = time.monotonic() + ANSWER_S
    while open_descriptors(target) > before + 4:
        assert time.monotonic() < until, "descriptors that were sent are kept for ever"
        time.sleep(0.05)


def hello_of(client: RawClient) -> bytes:
    return descriptors.pack(descriptors.Hello(token=client.token, member=0))


def open_descriptors(target: Target) -> int:
    return len(os.listdir(f"/proc/{target.service.daemon_pid}/fd"))


def throw(sock: socket.socket, packets: Sequence[tuple[bytes, str]]) -> None:
    """Sends packets with what belongs to them, and reads what comes until it is quiet."""
    sock.settimeout(0.5)
    for packet, attached in packets:
        fds: list[int] = []
        if attached in ("memory", "many"):
            fds = [create_memfd("fuzz", 1 << 20) for _ in range(1 if attached == "memory" else 3)]
        elif attached == "small":
            fds = [create_memfd("fuzz", 4096)]
        elif attached == "pipe":
            fds = list(os.pipe())[:1]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        with contextlib.suppress(OSError):
            sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        for fd in fds:
            os.close(fd)
    sock.settimeout(0.02)
    with contextlib.suppress(OSError):
        while sock.recvmsg(1024, 4096)[0]:
            pass
