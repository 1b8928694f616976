"""What fuzzing needs: how many examples, arbitrary messages of the protocol, and a service that must stay sound.

`KVSTORE_FUZZ_SECONDS` says about how long all of it may take on two cores (`make fuzz SECONDS=600`); without it the
number of examples is small, so that fuzzing is part of the default tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
from tests.support.raw_client import RawClient

__all__ = ["Known", "Target", "examples", "messages", "mutations", "packed_messages"]

DEFAULT_S = 15.0
"""About what the default number of examples takes on two cores."""
_NO_ANSWERS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # a hang
)


def examples(count: int) -> settings:
    """Settings for `count` examples, or more where more time is given."""
    scale = float(os.environ.get("KVSTORE_FUZZ_SECONDS", DEFAULT_S)) / DEFAULT_S
    return settings(
        max_examples=max(1, round(count * scale)),
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.function_scoped_fixture,
        ],
        print_blob=True,
    )


# ------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an attacker knows and may put anywhere: values that mean something to the service."""

    numbers: Sequence[int] = ()
    """Slots, generations, namespaces, sessions, leases."""
    bytes: Sequence[bytes] = ()
    """Tokens, hashes, packed records."""


_EDGES = (0, 1, 2, 3, 7, 63, 64, 127, 255, 4095, 4096, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)
_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
}
_MAX_DEPTH = 4


def messages(
    kind: type[Message], known: Known, fixed: dict[str, Any] | None = None
) -> st.SearchStrategy[Any]:
    """Any message of a kind: each field absent, at an edge, known, or anything. `fixed` are fields that stand."""

    def made(fields: dict[str, Any]) -> Any:
        return kind(**fields | (fixed or {}))

    return _fields(kind.DESCRIPTOR, known, 0).map(made)


def _fields(descriptor: Descriptor, known: Known, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    values = {item.name: _value(item, known, depth) for item in descriptor.fields}
    one_of = {
        item.name: item.containing_oneof.name
        for item in descriptor.fields
        if item.containing_oneof is not None
    }

    def one_each(found: dict[str, Any]) -> dict[str, Any]:
        taken: dict[str, str] = {}
        for name in found:
            taken.setdefault(one_of.get(name, name), name)
        return {name: found[name] for name in taken.values()}

    return st.fixed_dictionaries({}, optional=values).map(one_each)


def _value(item: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if item.message_type is not None and item.message_type.GetOptions().map_entry:
        return st.just({})
    one = _one(item, known, depth)
    repeated = getattr(item, "is_repeated", None)
    if repeated is None:  # older protobuf
        repeated = item.label == FieldDescriptor.LABEL_REPEATED
    return st.lists(one, max_size=4) if repeated else one


def _one(item: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    match item.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _fields(item.message_type, known, depth + 1) if depth < _MAX_DEPTH else st.just({})
        case FieldDescriptor.CPPTYPE_STRING:
            return st.text(max_size=300) if item.type == FieldDescriptor.TYPE_STRING else _bytes(known)
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.integers(0, 5)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case number:
            least, most = _RANGES[number]
            edges = [edge for edge in (*_EDGES, *known.numbers, most) if least <= edge <= most]
            return st.sampled_from(edges) | st.integers(least, most)


def _bytes(known: Known) -> st.SearchStrategy[bytes]:
    anything = (
        st.binary(max_size=70)
        | st.binary(min_size=48, max_size=48)
        | st.just(bytes(16))
        | st.just(b"\xff" * 48)
    )
    if not known.bytes:
        return anything
    of_known = st.sampled_from(list(known.bytes))
    return of_known | of_known | mutations(of_known) | anything


def mutations(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Valid bytes that are cut, doubled, or have some of their own replaced, added or taken out."""

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(valid))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(data)))
            how = draw(st.sampled_from(["flip", "replace", "insert", "delete", "cut", "double"]))
            if how == "flip" and at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            elif how == "replace":
                new = draw(st.binary(min_size=1, max_size=16))
                data[at : at + len(new)] = new
            elif how == "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            elif how == "delete":
                del data[at : at + draw(st.integers(1, 16))]
            elif how == "cut":
                del data[at:]
            elif how == "double" and len(data) < 1 << 16:
                data += bytes(data)
        return bytes(data)

    return mutated()


def packed_messages(kind: type[Message], known: Known) -> st.SearchStrategy[bytes]:
    """Bytes that are a message, nearly one, or none."""
    whole = messages(kind, known).map(lambda message: bytes(message.SerializeToString()))
    return mutations(whole) | st.binary(max_size=200)


# ------------------------------------------------------------ the service


@dataclass(slots=True)
class Target:
    """A running service, and what must be true of it after each example."""

    service: Service
    clients: list[RawClient] = field(default_factory=list)
    _made: int = 0
    _pid: int = 0
    _internal_errors: int = 0

    def __post_init__(self) -> None:
        self._pid = self.service.daemon_pid

    @property
    def channel(self) -> grpc.Channel:
        """To its socket, for any bytes."""
        return grpc.insecure_channel(
            f"unix:{self.service.socket}",
            [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )

    def client(self, transport: Any = "rpc", **begin: Any) -> RawClient:
        """A client with everything open, in a namespace of its own; it is closed by `close`."""
        made = RawClient(self.service.socket, transport)
        self.clients.append(made)
        self._made += 1
        return made.begin(**{"model": f"model-{self._made}"} | begin)

    def close(self, client: RawClient) -> None:
        """Ends a client and its session, whatever has become of it."""
        client.connect()
        if client.attached is not None:
            with contextlib.suppress(grpc.RpcError):
                client.stub.Detach(pb.DetachRequest(token=client.token), timeout=5.0, wait_for_ready=True)
        client.close()
        self.clients.remove(client)

    @contextlib.contextmanager
    def attacked(self, transport: Any = "rpc", **begin: Any) -> Iterator[RawClient]:
        """A client for one example."""
        client = self.client(transport, **begin)
        try:
            yield client
        finally:
            self.close(client)

    def check(self) -> None:
        """Raises AssertionError unless the same daemon answers, nothing failed within it, and its state is sound."""
        stats = self.service.stats()
        errors = stats.counters.get("internal_errors_total", 0)
        assert errors == self._internal_errors, f"the daemon failed within: {self._fault()}"
        assert self.service.faults() == []
        assert self.service.daemon_pid == self._pid, "the daemon has died"
        assert stats.counters.get("wrong_blocks_total", 0) == 0

    def _fault(self) -> str:
        self._internal_errors = self.service.stats().counters.get("internal_errors_total", 0)
        return self.service.tail()[-3000:]

    def unpause(self) -> None:
        """What an attacker with an administrator's rights may have done."""
        self.service.call("Pause", pb.PauseRequest(paused=False), service="admin")

    def empty(self) -> None:
        """Nothing is held, and everything can be let go: nothing has leaked."""
        for client in list(self.clients):
            self.close(client)
        wait_for("no session", lambda: not self.service.stats().sessions)
        self.check()
        wait_for("nothing under way", lambda: not self.service.stats().moves_in_flight)
        assert self.service.tier("hbm").held_slots == 0
        assert self.service.tier("dram").held_slots == 0
        self.service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
        self.service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        assert self.service.stats().rows == 0
        assert self.service.tier("hbm").allocated_bytes == 0

    def code_of(self, call: Callable[[], Any]) -> grpc.StatusCode:
        """How a call ended. Raises AssertionError for an end that says nothing, or that the daemon failed."""
        code, details = grpc.StatusCode.OK, ""
        try:
            call()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        assert code not in _NO_ANSWERS, f"{code}: {details}; {self.service.tail()[-2000:]}"
        return code
