"""Every RPC of both services with anything in its request: an answer or an error with a code, and a sound service."""

from __future__ import annotations

import contextlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.fuzz.rig import Known, Target, examples, messages, packed_messages
from tests.support.raw_client import RawClient, attach_request

FILE = pb.DESCRIPTOR
UNARY = [
    (f"/{service.full_name}/{method.name}", method.input_type.name)
    for service in FILE.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
]
CALL_S = 30.0


def known_of(victim: RawClient) -> Known:
    assert victim.attached is not None
    hashes = victim.chain(range(40)).tobytes()
    return Known(
        numbers=[victim.attached.session, victim.ns.namespace],
        bytes=[victim.token, hashes, hashes[:16], hashes[:40]],
    )


def test_every_call_is_fuzzed() -> None:
    assert len(UNARY) >= 15
    assert {"Attach", "Flush", "Forget", "Clear"} <= {path.rpartition("/")[2] for path, _ in UNARY}


@pytest.mark.parametrize("path, kind", UNARY, ids=[path.rpartition("/")[2] for path, _ in UNARY])
def test_any_request_is_answered_with_a_code(target: Target, path: str, kind: str) -> None:
    """A request that no client of ours would send ended the daemon, or came back as UNKNOWN."""
    request = getattr(pb, kind)
    with target.attacked() as victim, target.channel as channel:
        victim.fill(range(40))
        send = channel.unary_unary(path)

        @examples(10)
        @given(
            packed=messages(request, known_of(victim)).map(bytes_of)
            | packed_messages(request, known_of(victim))
        )
        def attack(packed: bytes) -> None:
            if kind == "FlushRequest":
                packed += pb.FlushRequest(
                    deadline_ms=5
                ).SerializeToString()  # the last one counts: no long waits
            answers: list[bytes] = []
            target.code_of(lambda: answers.append(send(packed, timeout=CALL_S)))
            clean_up(target, path, answers)
            target.check()

        attack()


def bytes_of(message: pb.AttachRequest) -> bytes:
    return message.SerializeToString()


def clean_up(target: Target, path: str, answers: list[bytes]) -> None:
    """Takes back what an answered attack has done, so that the next one meets the same service."""
    if not answers:
        return
    if path.endswith("/Attach"):
        reply = pb.AttachReply.FromString(answers[0])
        with contextlib.suppress(Exception):
            target.service.call("Detach", pb.DetachRequest(token=reply.token))
    elif path.endswith("/Pause"):
        target.unpause()


@examples(60)
@given(data=st.data())
def test_an_attach_that_is_nearly_right(target: Target, data: st.DataObject) -> None:
    """Sizes at every edge: budgets, shapes and members whose product no memory has."""
    known = Known(numbers=[1 << 20, 1 << 40, (1 << 63) - 1])
    right = attach_request()
    wrong = data.draw(messages(pb.AttachRequest, known), label="wrong")
    names = data.draw(
        st.lists(
            st.sampled_from([item.name for item in wrong.DESCRIPTOR.fields]),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    for name in names:
        right.ClearField(name)
    for item, value in wrong.ListFields():
        if item.name in names:
            one = pb.AttachRequest()
            if isinstance(value, bytes | str | int | float | bool):
                setattr(one, item.name, value)
            elif hasattr(value, "CopyFrom"):
                getattr(one, item.name).CopyFrom(value)
            else:
                getattr(one, item.name).extend(value)
            right.MergeFrom(one)
    with target.channel as channel:
        call = channel.unary_unary("/kvstore.v1.Kvstore/Attach")
        answers: list[bytes] = []
        target.code_of(lambda: answers.append(call(right.SerializeToString(), timeout=CALL_S)))
    clean_up(target, "/Attach", answers)
    target.check()


def test_a_request_larger_than_any_is_refused(target: Target) -> None:
    with target.channel as channel:
        for path in ("/kvstore.v1.Kvstore/Attach", "/kvstore.v1.Admin/Clear"):
            send = channel.unary_unary(path)
            code = target.code_of(lambda send=send: send(bytes(64 << 20), timeout=CALL_S))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    target.check()


def test_a_method_that_is_not_there_is_said(target: Target) -> None:
    with target.channel as channel:
        send = channel.unary_unary("/kvstore.v1.Kvstore/Nothing")
        assert target.code_of(lambda: send(b"", timeout=CALL_S)) is grpc.StatusCode.UNIMPLEMENTED
