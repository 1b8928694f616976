"""A client that speaks the protocol by hand: a test can say anything at any time, also what no client should."""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.client.framed import FramedStream
from kvstore.errors import KvstoreError
from kvstore.identity import HashChain
from kvstore.layout import Columns, Tier, open_columns, read_shape
from kvstore.wire import descriptors as wire
from kvstore.wire.frames import stream_path
from kvstore.wire.packed import COPY, SEAL, u8_of, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from kvstore.wire.v1 import kvstore_pb2_grpc
from tests.support.daemon import DEADLINE_S
from tiers.memfd import create_memfd
from tiers.twin import TwinDevice

__all__ = [
    "BLOCK_TOKENS",
    "SLOT_BYTES",
    "Granted",
    "RawClient",
    "StreamEnd",
    "attach_request",
    "namespace_parts",
]

BLOCK_TOKENS = 4
SLOT_BYTES = 16_384


def attach_request(**changes: object) -> pb.AttachRequest:
    """Slots of 16 KiB on twin 0."""
    group = pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=1, kv_heads=1, head_dim=512, block_tokens=BLOCK_TOKENS)
    request = pb.AttachRequest(
        protocol_version=1,
        name="raw",
        groups=[group],
        dtype="float32",
        device=pb.Device(kind=pb.DEVICE_KIND_TWIN, index=0, identity=TwinDevice().identity),
        hbm_bytes=1024 * SLOT_BYTES,
    )
    request.MergeFrom(pb.AttachRequest(**changes))  # type: ignore[arg-type]
    return request


def namespace_parts(model: str = "m") -> list[pb.NamespacePart]:
    """A namespace named by its model."""
    parts = {
        "model": model,
        "weights": "w",
        "dtype": "float32",
        "block_tokens": str(BLOCK_TOKENS),
        "groups": "g",
    }
    return [pb.NamespacePart(tag=tag, value=value.encode()) for tag, value in parts.items()]


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant, decoded."""

    outcomes: list[int]
    hbm: NDArray[np.uint32]
    hbm_generations: NDArray[np.uint32]
    dram: NDArray[np.uint32]
    dram_generations: NDArray[np.uint32]
    reserve: NDArray[np.uint32]
    reserve_generations: NDArray[np.uint32]


class StreamEnd(grpc.RpcError):
    """How a framed stream ended, told as an RPC tells it."""

    def __init__(self, error: KvstoreError) -> None:
        super().__init__(str(error))
        self._code = error.grpc_code

    def code(self) -> grpc.StatusCode:
        """The status."""
        return grpc.StatusCode[self._code]


class RawClient:
    """One session, driven by hand. Everything has a deadline."""

    def __init__(self, socket_path: str, transport: Literal["rpc", "frames"] = "rpc") -> None:
        """`transport`: of the session stream."""
        self._path = socket_path
        self._transport = transport
        self._channel: grpc.Channel | None = None
        self._outgoing: queue.Queue[pb.ClientMessage | None] = queue.Queue()
        self._incoming: queue.Queue[pb.ServerMessage | grpc.RpcError | None] = queue.Queue()
        self.connection: socket.socket | None = None
        self._dialled: list[socket.socket] = []
        self._framed: list[tuple[queue.Queue[pb.ClientMessage | None], FramedStream]] = []
        self.columns: Columns | None = None
        self.attached: pb.AttachReply | None = None
        self.hbm: dict[int, int] = {}  # extent → fd
        self.hbm_base = 0
        self.dram_fds: dict[int, int] = {}
        self.next_id = 1
        self.seen = 0
        self.connect()

    # ------------------------------------------------------------ opening

    def connect(self) -> None:
        """A new channel (after a restart of the daemon, or a loss)."""
        if self._channel is not None:
            self._channel.close()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100)]
        self._channel = grpc.insecure_channel(f"unix:{self._path}", options)
        self.stub = kvstore_pb2_grpc.KvstoreStub(self._channel)
        self.admin = kvstore_pb2_grpc.AdminStub(self._channel)

    def attach(self, **changes: object) -> pb.AttachReply:
        """Attach."""
        self.attached = self.stub.Attach(attach_request(**changes), timeout=DEADLINE_S)
        return self.attached

    @property
    def token(self) -> bytes:
        """Of the session."""
        assert self.attached is not None
        return self.attached.token

    def dial(self) -> socket.socket:
        """A connection to the descriptor socket."""
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._dialled.append(self.connection)
        self.connection.settimeout(DEADLINE_S)
        self.connection.connect(wire.descriptor_path(self._path))
        return self.connection

    def hello(
        self, *, member: int = 0, pid: int | None = None, token: bytes | None = None
    ) -> list[wire.Message]:
        """Presents this process (or `pid`), takes what comes until Ready or a refusal."""
        connection = self.dial()
        pidfd = os.pidfd_open(os.getpid() if pid is None else pid)
        wire.send(connection, wire.Hello(token=token or self.token, member=member), [pidfd])
        os.close(pidfd)
        messages = []
        while True:
            received = wire.receive(connection)
            if received is None:
                return messages
            messages.append(received.message)
            self._take(received)
            if isinstance(received.message, wire.Ready | wire.Refused):
                return messages

    def _take(self, received: wire.Received) -> None:
        message = received.message
        if isinstance(message, wire.Tables):
            memory = memoryview(mmap.mmap(received.fds[0], message.nbytes, prot=mmap.PROT_READ))
            self.columns = open_columns(memory, read_shape(memory))
            received.close()
        elif isinstance(message, wire.Extent) and received.fds:
            target = self.dram_fds if message.tier == Tier.DRAM else self.hbm
            if message.tier == Tier.HBM:
                self.hbm_base = message.slot_base
            if message.extent in target:
                received.close()
            else:
                target[message.extent] = received.fds[0]

    def receive_descriptor(self) -> wire.Message | None:
        """The next message of the descriptor socket."""
        assert self.connection is not None
        received = wire.receive(self.connection)
        if received is None:
            return None
        self._take(received)
        return received.message

    def give_hbm(
        self, slots: int = 64, slot_bytes: int = SLOT_BYTES, *, fd: int | None = None
    ) -> wire.Message | None:
        """Makes an HBM extent and gives it, or gives `fd` as one, which becomes ours; the answer."""
        assert self.connection is not None
        fd = create_memfd("test-hbm", slots * slot_bytes) if fd is None else fd
        message = wire.NewHbm(nbytes=slots * slot_bytes, slots=slots, slot_bytes=slot_bytes)
        wire.send(self.connection, message, [fd])
        while isinstance(answer := self.receive_descriptor(), wire.Extent | wire.Tables | wire.Ready):
            continue
        if isinstance(answer, wire.Accepted):
            self.hbm[answer.extent] = fd
            self.hbm_base = answer.slot_base
        else:
            os.close(fd)
        return answer

    def open_stream(self, token: bytes | None = None) -> None:
        """Opens the session stream."""
        self._outgoing, self._incoming = queue.Queue(), queue.Queue()
        self.next_id = 1
        outgoing, incoming = self._outgoing, self._incoming

        def messages() -> Iterator[pb.ClientMessage]:
            while (message := outgoing.get()) is not None:
                yield message

        token = self.token if token is None else token
        call: Any
        if self._transport == "frames":
            call = FramedStream(stream_path(self._path), token, messages())
            self._framed.append((outgoing, call))
        else:
            call = self.stub.Session(messages(), metadata=(("kvstore-token-bin", token),))
        self.call = call

        def read() -> None:
            try:
                for message in call:
                    incoming.put(message)
                incoming.put(None)
            except grpc.RpcError as error:
                incoming.put(error)
            except KvstoreError as error:
                incoming.put(StreamEnd(error))

        threading.Thread(target=read, daemon=True).start()

    def namespace(self, model: str = "m") -> pb.OpenNamespaceReply:
        """Opens a namespace."""
        request = pb.OpenNamespaceRequest(token=self.token, parts=namespace_parts(model))
        return self.stub.OpenNamespace(request, timeout=DEADLINE_S)

    def begin(self, *, hbm_slots: int = 64, model: str = "m", **changes: object) -> RawClient:
        """The whole opening; `self.ns` is the namespace."""
        self.attach(**changes)
        self.hello()
        if hbm_slots and not self.hbm:
            answer = self.give_hbm(hbm_slots)
            assert isinstance(answer, wire.Accepted), answer
        self.open_stream()
        self.ns = self.namespace(model)
        return self

    def resume(
        self, hbm: Sequence[tuple[int, int]] = (), dram: Sequence[tuple[int, int]] = ()
    ) -> pb.AttachReply:
        """Attach(resume) with (slot, generation) pairs."""
        resume = pb.Resume(
            token=self.token,
            hbm_slots=_u32([slot for slot, _ in hbm]),
            hbm_generations=_u32([generation for _, generation in hbm]),
            dram_slots=_u32([slot for slot, _ in dram]),
            dram_generations=_u32([generation for _, generation in dram]),
        )
        self.attached = self.stub.Attach(
            attach_request(resume=resume), timeout=DEADLINE_S, wait_for_ready=True
        )
        return self.attached

    # ------------------------------------------------------------ the stream

    def send(self, **body: object) -> int:
        """Sends one message under the next id."""
        message_id = self.next_id
        self.next_id += 1
        self._outgoing.put(pb.ClientMessage(id=message_id, **body))  # type: ignore[arg-type]
        return message_id

    def send_raw(self, message: pb.ClientMessage) -> None:
        """Sends a message as it is."""
        self._outgoing.put(message)

    def receive(self, timeout_s: float = DEADLINE_S) -> pb.ServerMessage:
        """The next message. Raises RpcError at a failed end, EOFError at a clean one."""
        item = self._incoming.get(timeout=timeout_s)
        if isinstance(item, grpc.RpcError):
            raise item
        if item is None:
            raise EOFError
        assert item.id > self.seen, "ids of the daemon must increase"
        self.seen = item.id
        return item

    def receive_body(self, *bodies: str) -> pb.ServerMessage:
        """The next message with one of these bodies; others are passed over."""
        while True:
            message = self.receive()
            if message.WhichOneof("body") in bodies:
                return message

    def chain(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        """Hashes of a prompt in the namespace."""
        return HashChain(self.ns.key, BLOCK_TOKENS, list(tokens)).hashes

    def acquire(
        self, hashes: NDArray[np.uint64], *, lease: int = 1, first: int = 0, **more: object
    ) -> Granted:
        """Acquire and its grant."""
        self.send(
            acquire=pb.Acquire(
                namespace=self.ns.namespace,
                lease=lease,
                hashes=hashes.tobytes(),
                first=first,
                **more,  # type: ignore[arg-type]
            )
        )
        message = self.receive_body("grant", "error")
        assert message.WhichOneof("body") == "grant", message.error
        grant = message.grant
        return Granted(
            u8_of(grant.outcomes).tolist(),
            u32_of(grant.hbm_slots),
            u32_of(grant.hbm_generations),
            u32_of(grant.dram_slots),
            u32_of(grant.dram_generations),
            u32_of(grant.reserve_slots),
            u32_of(grant.reserve_generations),
        )

    def seals(self, hashes: NDArray[np.uint64], granted: Granted, first: int = 0) -> NDArray[np.void]:
        """SEAL[] for the blocks of a grant that started at `first`."""
        seals = np.zeros(len(granted.hbm), dtype=SEAL)
        seals["slot"], seals["generation"] = granted.hbm, granted.hbm_generations
        seals["namespace"] = self.ns.namespace
        seals["depth"] = np.arange(first, first + len(seals))
        seals["hash"] = hashes[first:]
        seals["parent"][1:] = hashes[first : first + len(seals) - 1]
        if first:
            seals["parent"][0] = hashes[first - 1]
        return seals

    def seal(self, seals: NDArray[np.void]) -> list[int]:
        """Step with seals; their outcomes."""
        self.step(seals=seals.tobytes())
        message = self.receive_body("step_result", "error")
        assert message.WhichOneof("body") == "step_result", message.error
        return u8_of(message.step_result.seal_outcomes).tolist()

    def step(self, **fields: object) -> int:
        """A step, with `seen` as it is."""
        return self.send(step=pb.Step(seen=self.seen, **fields))  # type: ignore[arg-type]

    def release(self, hbm: Sequence[int] = (), dram: Sequence[int] = ()) -> None:
        """Gives slots back."""
        self.step(released_hbm=_u32(hbm), released_dram=_u32(dram))

    def fill(self, tokens: Sequence[int]) -> tuple[NDArray[np.uint64], Granted]:
        """Acquires a prompt that nobody has, and seals all of it."""
        hashes = self.chain(tokens)
        granted = self.acquire(hashes)
        assert granted.outcomes == [pb.OUTCOME_MISS] * len(hashes), granted.outcomes
        assert self.seal(self.seals(hashes, granted)) == [pb.SEAL_OUTCOME_PUBLISHED] * len(hashes)
        return hashes, granted

    def write_through(self, hashes: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Says that every block of a chain, which is in HBM, was copied into DRAM; (slot, generation) there."""
        held = self.acquire(hashes, lease=77)
        self.step(want_room=len(hashes))
        slots = self.receive_body("slots").slots
        room, generations = u32_of(slots.dram_slots), u32_of(slots.dram_generations)
        assert len(room) >= len(hashes), f"room for {len(room)} blocks only"
        copies = np.zeros(len(hashes), dtype=COPY)
        copies["source"], copies["source_generation"] = held.hbm, held.hbm_generations
        copies["target"], copies["target_generation"] = room[: len(hashes)], generations[: len(hashes)]
        self.step(stores=copies.tobytes())
        self.acquire(hashes[:0])  # the stream is ordered: the step is done when this is answered
        return list(zip(room.tolist(), generations.tolist(), strict=True))

    # ------------------------------------------------------------ ending

    def drop_stream(self) -> None:
        """Cancels the stream, as a crash of the channel would."""
        self.call.cancel()

    def close(self) -> None:
        """Closes everything; the process lives on."""
        self._outgoing.put(None)
        if self._channel is not None:
            self._channel.close()
        for requests, call in self._framed:
            requests.put(None)
            call.close()
        for connection in self._dialled:
            connection.close()
        for fd in (*self.hbm.values(), *self.dram_fds.values()):
            os.close(fd)
        self.hbm.clear()
        self.dram_fds.clear()


def _u32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<u4").tobytes()
