"""What a client may say on its stream, in whatever order: refused messages change nothing, nothing leaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import grpc
import numpy as np
import pytest

from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
from tests.support.raw_client import RawClient

Make = Callable[[], RawClient]
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.PERMISSION_DENIED.value[0]
MISS, HIT_HBM, PENDING = pb.OUTCOME_MISS, pb.OUTCOME_HIT_HBM, pb.OUTCOME_PENDING


@pytest.fixture(params=["rpc", "frames"])
def transport(request: pytest.FixtureRequest) -> Literal["rpc", "frames"]:
    """Whatever holds for one holds for the other."""
    chosen: Literal["rpc", "frames"] = request.param
    return chosen


def refused(client: RawClient) -> pb.StreamError:
    """The refusal that comes next."""
    return client.receive_body("error").error


def test_a_block_is_filled_sealed_and_hit(client: Make) -> None:
    one = client().begin()
    hashes, granted = one.fill(range(40))
    assert len(set(granted.hbm.tolist())) == 10
    again = one.acquire(hashes, lease=2)
    assert again.outcomes == [HIT_HBM] * 10
    assert again.hbm.tolist() == granted.hbm.tolist()


def test_a_block_is_a_hit_for_another_session(client: Make) -> None:
    one, other = client().begin(), client().begin()
    hashes, granted = one.fill(range(100, 140))
    assert other.acquire(hashes).hbm.tolist() == granted.hbm.tolist()


def test_filled_is_not_sealed(client: Make) -> None:
    """Elsewhere blocks were visible to others before they were complete."""
    one, other = client().begin(), client().begin()
    hashes = one.chain(range(200, 240))
    granted = one.acquire(hashes)
    assert other.acquire(hashes).outcomes[0] == PENDING
    one.seal(one.seals(hashes, granted))
    assert list(other.receive_body("changed").changed.leases) == [1]
    assert other.acquire(hashes).outcomes == [HIT_HBM] * 10


def test_a_lost_filler_wakes_who_waits(client: Make) -> None:
    """Elsewhere a request waited for ever for a block whose filler had crashed."""
    one, other = client().begin(), client().begin()
    hashes = one.chain(range(300, 340))
    one.acquire(hashes)
    assert other.acquire(hashes).outcomes[0] == PENDING
    one.drop_stream()
    assert list(other.receive_body("changed").changed.leases) == [1]
    assert other.acquire(hashes).outcomes == [MISS] * 10


def test_another_salt_is_another_block(client: Make) -> None:
    one, other = client().begin(model="a"), client().begin(model="b")
    hashes, _ = one.fill(range(400, 440))
    assert other.acquire(other.chain(range(400, 440))).outcomes == [MISS] * 10
    assert other.acquire(hashes, lease=2).outcomes == [MISS] * 10, (
        "the other namespace's hashes name nothing here"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"acquire": pb.Acquire(namespace=63, lease=1, hashes=bytes(16))},
        {"prefetch": pb.Prefetch(namespace=63, lease=1, hashes=bytes(16))},
        {"step": pb.Step(seals=bytes(8) + (63).to_bytes(4, "little") + bytes(36))},
    ],
    ids=["acquire", "prefetch", "seal"],
)
def test_a_namespace_that_was_not_opened_is_refused(client: Make, body: dict[str, object]) -> None:
    one = client().begin()
    message_id = one.send(**body)
    error = refused(one)
    assert (error.id, error.code) == (message_id, DENIED)
    assert one.fill(range(20))


@pytest.mark.parametrize(
    "field",
    [
        {"seals": bytes(47)},
        {"loads": bytes(15)},
        {"stores": bytes(17)},
        {"released_hbm": bytes(3)},
        {"released_dram": bytes(5)},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_step_of_a_wrong_size_is_refused_whole(client: Make, field: dict[str, bytes]) -> None:
    one = client().begin()
    _, granted = one.fill(range(20))
    one.step(**{"released_hbm": granted.hbm.tobytes(), **field})
    assert refused(one).code == INVALID
    if "released_hbm" not in field:
        held = one.stub.Stats(pb.StatsRequest(), timeout=30).sessions[0].held_hbm_slots
        assert held == 5, "nothing of a refused step is done"


def test_hashes_of_a_wrong_size_are_refused(client: Make) -> None:
    one = client().begin()
    one.send(acquire=pb.Acquire(namespace=one.ns.namespace, lease=1, hashes=bytes(17)))
    assert refused(one).code == INVALID
    one.send(acquire=pb.Acquire(namespace=one.ns.namespace, lease=1, hashes=bytes(16), first=2))
    assert refused(one).code == INVALID


def test_a_chain_beyond_the_limit_is_refused(client: Make) -> None:
    one = client().begin()
    most = one.attached.max_message_blocks if one.attached else 0
    one.send(acquire=pb.Acquire(namespace=one.ns.namespace, lease=1, hashes=bytes(16 * (most + 1))))
    assert refused(one).code == INVALID
    assert one.fill(range(20))


def test_a_message_beyond_the_limit_ends_the_stream(client: Make, service: Service) -> None:
    one = client().begin()
    one.send(acquire=pb.Acquire(namespace=one.ns.namespace, lease=1, hashes=bytes(5 << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        one.receive()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")


def test_a_message_without_a_body_is_refused(client: Make) -> None:
    one = client().begin()
    one.send()
    assert refused(one).code == INVALID


def test_a_replayed_message_is_refused_and_does_nothing(client: Make, service: Service) -> None:
    """Elsewhere a message that was delivered twice gave slots twice, and nobody released the second ones."""
    one = client().begin()
    hashes = one.chain(range(20))
    one.acquire(hashes)
    held = service.stats().sessions[0].held_hbm_slots
    one.send_raw(
        pb.ClientMessage(
            id=1, acquire=pb.Acquire(namespace=one.ns.namespace, lease=1, hashes=hashes.tobytes())
        )
    )
    error = refused(one)
    assert (error.id, error.code) == (1, INVALID)
    assert service.stats().sessions[0].held_hbm_slots == held


def test_a_stale_seal_publishes_nothing(client: Make) -> None:
    """Elsewhere a slot that had been given to somebody else was sealed under the hash of its earlier owner."""
    one = client().begin()
    hashes = one.chain(range(500, 520))
    granted = one.acquire(hashes)
    seals = one.seals(hashes, granted)
    one.release(hbm=granted.hbm.tolist())
    assert one.seal(seals) == [pb.SEAL_OUTCOME_STALE] * 5
    assert one.acquire(hashes).outcomes == [MISS] * 5


def test_seals_of_foreign_or_impossible_slots_are_stale(client: Make) -> None:
    one, other = client().begin(), client().begin()
    hashes = one.chain(range(600, 620))
    granted = one.acquire(hashes)
    assert other.seal(one.seals(hashes, granted)) == [pb.SEAL_OUTCOME_STALE] * 5
    seals = one.seals(hashes, granted)
    seals["slot"] = 0xFFFFFFF0
    assert one.seal(seals) == [pb.SEAL_OUTCOME_STALE] * 5


def test_a_repeated_seal_is_published_again(client: Make) -> None:
    one = client().begin()
    hashes = one.chain(range(700, 720))
    seals = one.seals(hashes, one.acquire(hashes))
    assert one.seal(seals) == one.seal(seals) == [pb.SEAL_OUTCOME_PUBLISHED] * 5


def test_a_release_does_not_overtake_a_grant(client: Make) -> None:
    """Elsewhere a release that was decided before a grant arrived gave back what that grant had just given."""
    one = client().begin()
    hashes, granted = one.fill(range(800, 820))
    seen = one.seen
    assert one.acquire(hashes, lease=2).outcomes == [HIT_HBM] * 5
    one.send(step=pb.Step(seen=seen, released_hbm=granted.hbm.tobytes()))
    one.send(cancel=pb.Cancel(lease=99))
    assert one.acquire(hashes[:0]).outcomes == []
    assert one.stub.Stats(pb.StatsRequest(), timeout=30).sessions[0].held_hbm_slots == 5


def test_released_slots_of_others_stay_held(client: Make) -> None:
    one, other = client().begin(), client().begin()
    _, granted = one.fill(range(900, 920))
    other.release(hbm=[*granted.hbm.tolist(), 0xFFFFFFFF, 0xFFFFFF], dram=[0xFFFFFFF])
    other.acquire(other.chain(range(0)))
    sessions = one.stub.Stats(pb.StatsRequest(), timeout=30).sessions
    assert max(session.held_hbm_slots for session in sessions) == 5


def test_a_stream_needs_the_token(client: Make) -> None:
    one = client().begin()
    for token in (bytes(16), one.token[:-1]):
        one.open_stream(token=token)
        with pytest.raises(grpc.RpcError) as caught:
            one.receive()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_session_has_one_stream(client: Make) -> None:
    one = client().begin()
    first = one._outgoing, one._incoming, one.next_id
    one.open_stream()
    with pytest.raises(grpc.RpcError) as caught:
        one.receive()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    one._outgoing, one._incoming, one.next_id = first
    assert one.fill(range(20))


def test_a_lost_stream_must_resume(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, granted = one.fill(range(1000, 1020))
    one.drop_stream()
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")
    assert service.stats().sessions[0].held_hbm_slots == 5, "what a live process holds stays held"
    one.open_stream()
    with pytest.raises(grpc.RpcError) as caught:
        one.receive()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    one.resume(hbm=list(zip(granted.hbm[:2].tolist(), granted.hbm_generations[:2].tolist(), strict=True)))
    one.open_stream()
    one.ns = one.namespace()
    assert service.stats().sessions[0].held_hbm_slots == 2, "what a resume does not state is released"
    assert one.acquire(hashes).outcomes == [HIT_HBM] * 5


def test_a_resume_takes_over_from_a_stream_that_still_stands(client: Make) -> None:
    """The client sees its stream break before the daemon does."""
    one = client().begin()
    one.resume()
    with pytest.raises(grpc.RpcError) as caught:
        one.receive()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    one.open_stream()
    assert one.fill(range(20))


def test_credit_and_room_come_by_themselves(client: Make) -> None:
    one = client().begin()
    one.step(want_slots=8, want_room=4)
    slots = one.receive_body("slots").slots
    assert (len(slots.hbm_slots), len(slots.dram_slots)) == (32, 16)


def test_a_client_that_reads_nothing_loses_its_stream_only(client: Make, service: Service) -> None:
    """Elsewhere answers for a client that had stopped reading grew in the server's memory without end."""
    one = client().begin()
    hashes = one.chain(range(40_000))
    before = service.stats().counters["streams_overflowed_total"]
    stalled = RawStalled(one)
    until = time.monotonic() + 30
    while time.monotonic() < until and service.stats().counters["streams_overflowed_total"] == before:
        stalled.send_many(one.ns.namespace, hashes)
        time.sleep(0.05)
    assert service.stats().counters["streams_overflowed_total"] == before + 1
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")
    other = client().begin(hbm_slots=0)
    assert other.acquire(other.chain(range(20))).outcomes
    stalled.close()


class RawStalled:
    """A second stream of a session's, on a channel of its own, that sends and never reads."""

    def __init__(self, client: RawClient) -> None:
        import queue

        client.resume()
        self._queue: queue.Queue[pb.ClientMessage | None] = queue.Queue()
        self._channel = grpc.insecure_channel(
            f"unix:{client._path}",
            [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.http2.lookahead_bytes", 1024),
                ("grpc.http2.bdp_probe", 0),
            ],
        )
        method = self._channel.stream_stream(
            "/kvstore.v1.Kvstore/Session",
            request_serializer=pb.ClientMessage.SerializeToString,
            response_deserializer=None,
        )
        self.call = method(iter(self._queue.get, None), metadata=(("kvstore-token-bin", client.token),))
        client.ns = client.namespace()
        self._next = 1

    def send_many(self, namespace: int, hashes: np.ndarray) -> None:  # type: ignore[type-arg]
        """Many acquires whose answers are large."""
        for _ in range(50):
            body = pb.Acquire(namespace=namespace, lease=self._next, hashes=hashes.tobytes())
            self._queue.put(pb.ClientMessage(id=self._next, acquire=body))
            self._next += 1

    def close(self) -> None:
        """Ends it."""
        self._queue.put(None)
        self.call.cancel()
        self._channel.close()


def test_what_an_old_stream_still_says_counts_no_more(client: Make, service: Service) -> None:
    """A release that was under way on a lost stream came after the resume and gave back a slot granted since."""
    one = client().begin()
    _, granted = one.fill(range(20))
    statement = list(zip(granted.hbm.tolist(), granted.hbm_generations.tolist(), strict=True))
    old = one._outgoing
    one.resume(hbm=statement)
    for message_id in range(100, 150):
        old.put(pb.ClientMessage(id=message_id, step=pb.Step(seen=2**63, released_hbm=granted.hbm.tobytes())))
    one.open_stream()
    one.ns = one.namespace()
    time.sleep(0.2)
    assert service.stats().sessions[0].held_hbm_slots == 5
    old.put(None)
