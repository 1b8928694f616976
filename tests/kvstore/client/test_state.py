"""One session's state against messages written by hand: order, `seen`, resume, loss, the circuit breaker."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Changed, Listener, Lost, Namespace, PendingGrant, SealResult, Session, Targets
from kvstore.client.outbox import Cancel
from kvstore.client.state import SessionState
from kvstore.errors import Aborted, ResourceExhausted, Unavailable
from kvstore.layout import NONE, TableShape
from kvstore.moves import Outcome
from kvstore.wire.packed import COPY, SEAL, records_of, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb

SHAPE = TableShape(max_rows=64, hbm_slots=64, dram_slots=64, nvme_slots=1)
NO_SEALS = np.empty(0, dtype=SEAL)
NO_COPIES = np.empty(0, dtype=COPY)


def u32(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


class Rig:
    """A state with a stream, and the daemon played by the test."""

    def __init__(
        self,
        *,
        credit: int = 0,
        room: int = 0,
        blocks: int = 16,
        breaker_s: float = 1.0,
        first_credit: int | None = None,
    ) -> None:
        targets = Targets(credit=credit, room=room, breaker_s=breaker_s, first_credit=first_credit)
        self.state = SessionState(SHAPE, blocks, targets)
        self.namespace = Namespace({}, 4, 7, bytes(32))
        self.stream = self.state.open_stream()
        self._server_id = 100

    def acquire(self, blocks: int = 2, lease: int = 1, reserve: int = 0) -> PendingGrant:
        hashes = np.arange(2 * blocks, dtype=np.uint64).reshape(-1, 2)
        grant = PendingGrant(
            cast(Session, self.state),
            namespace=self.namespace,
            lease=lease,
            hashes=hashes,
            first=0,
            reserve=reserve,
            private_fill=False,
        )
        self.state.acquire(grant)
        return grant

    def sent(self) -> pb.ClientMessage:
        message = self.state.next_message(self.stream)
        assert message is not None
        return message

    def nothing_to_send(self) -> bool:
        return self.state._outbox.next(0.0) is None

    def answer(self, **body: object) -> int:
        self._server_id += 1
        self.state.apply(pb.ServerMessage(id=self._server_id, **body))  # type: ignore[arg-type]
        return self._server_id

    def grant(
        self, message: pb.ClientMessage, slots: NDArray[np.uint32], *, outcome: Outcome = Outcome.HIT_HBM
    ) -> int:
        none = np.full(len(slots), NONE, dtype=np.uint32)
        return self.answer(
            grant=pb.Grant(
                id=message.id,
                outcomes=bytes([outcome]) * len(slots),
                hbm_slots=slots.tobytes(),
                hbm_generations=np.ones(len(slots), dtype=np.uint32).tobytes(),
                dram_slots=none.tobytes(),
                dram_generations=none.tobytes(),
            )
        )

    def step(
        self,
        *,
        seals: NDArray[np.void] = NO_SEALS,
        stores: NDArray[np.void] = NO_COPIES,
        dropped: NDArray[np.uint32] | None = None,
    ) -> None:
        self.state.step(seals, NO_COPIES, stores, u32() if dropped is None else dropped, u32())

    def reconnect(self) -> None:
        self.state.close_stream()
        self.stream = self.state.open_stream()


def seals_of(*slots: int) -> NDArray[np.void]:
    seals = np.zeros(len(slots), dtype=SEAL)
    seals["slot"], seals["generation"] = slots, 1
    return seals


def test_steps_are_merged_until_they_leave() -> None:
    rig = Rig()
    grant = rig.acquire()
    rig.grant(rig.sent(), u32(3, 4))
    assert grant.done()
    rig.step(seals=seals_of(3))
    rig.step(seals=seals_of(4))
    message = rig.sent()
    assert records_of(message.step.seals, SEAL)["slot"].tolist() == [3, 4]
    assert rig.nothing_to_send()


def test_a_long_step_is_cut_and_releases_come_last() -> None:
    rig = Rig(blocks=2)
    slots = u32(1, 2, 3, 4, 5)
    rig.acquire(5)
    rig.grant(rig.sent(), slots)
    rig.state.stage(seals_of(1, 2, 3, 4, 5), NO_COPIES, NO_COPIES, slots, u32())
    rig.step()
    sealed: list[int] = []
    released: list[int] = []
    messages = [rig.sent() for _ in range(3)]
    for message in messages:
        assert len(message.step.seals) <= 2 * SEAL.itemsize
        sealed += records_of(message.step.seals, SEAL)["slot"].tolist()
        released += u32_of(message.step.released_hbm).tolist()
    assert sealed == [1, 2, 3, 4, 5]
    assert released == []
    for message in messages:
        rig.answer(step_result=pb.StepResult(id=message.id, seal_outcomes=b"\0\0"))
    for _ in range(3):
        released += u32_of(rig.sent().step.released_hbm).tolist()
    assert released == [1, 2, 3, 4, 5]


def test_a_slot_is_never_released_under_its_seal() -> None:
    """A seal that was sent behind the release of its slot was STALE, and the block was lost."""
    rig = Rig()
    rig.acquire(1)
    rig.grant(rig.sent(), u32(3))
    rig.state.stage(seals_of(3), NO_COPIES, NO_COPIES, u32(3), u32())  # the request ends in the same step
    rig.step()
    message = rig.sent()
    assert len(message.step.seals) == SEAL.itemsize
    assert not message.step.released_hbm
    rig.answer(step_result=pb.StepResult(id=message.id, seal_outcomes=b"\0"))
    assert u32_of(rig.sent().step.released_hbm).tolist() == [3]


def test_seen_is_the_newest_message_applied() -> None:
    """A release that overtook a grant freed the slot under the second request (rule B of the protocol)."""
    rig = Rig()
    first = rig.acquire(1, lease=1)
    granted = rig.grant(rig.sent(), u32(3))
    rig.acquire(1, lease=2)
    second_acquire = rig.sent()
    rig.step(dropped=first.result(0).hbm_slots)
    message = rig.sent()
    assert u32_of(message.step.released_hbm).tolist() == [3]
    assert message.step.seen == granted  # the daemon skips slot 3: it granted it again behind that
    rig.grant(second_acquire, u32(3))
    assert rig.state.hbm.held[3]
    rig.step(dropped=u32(3))
    assert u32_of(rig.sent().step.released_hbm).tolist() == [3]


def test_an_abandoned_grant_goes_back_whenever_it_comes() -> None:
    """A request aborted between its acquire and the grant leaked the slots of the grant."""
    rig = Rig()
    grant = rig.acquire()
    message = rig.sent()
    rig.state.abandon(grant)
    rig.grant(message, u32(3, 4))
    assert u32_of(rig.sent().step.released_hbm).tolist() == [3, 4]
    late = rig.acquire()
    rig.grant(rig.sent(), u32(5, 6))
    rig.state.abandon(late)
    rig.state.abandon(late)
    assert u32_of(rig.sent().step.released_hbm).tolist() == [5, 6]
    assert not rig.state.hbm.references.any()


def test_an_abandoned_acquire_that_was_not_sent_is_not_sent() -> None:
    rig = Rig()
    rig.state.abandon(rig.acquire())
    assert rig.nothing_to_send()


def test_credit_is_asked_for_below_half_and_taken_without_an_answer() -> None:
    rig = Rig(credit=8, room=4)
    message = rig.sent()
    assert (message.step.want_slots, message.step.want_room) == (8, 4)
    rig.step()
    assert rig.nothing_to_send()  # asked already
    rig.answer(
        slots=pb.Slots(
            hbm_slots=np.arange(8, dtype=np.uint32).tobytes(), hbm_generations=np.ones(8, np.uint32).tobytes()
        )
    )
    for taken in range(4):
        assert rig.state.take_credit(1) is not None, taken
    rig.step()
    message = rig.sent()
    assert message.step.want_slots == 0  # the room is still asked for
    assert rig.state.take_credit(5) is None
    run = rig.state.take_credit(1)
    assert run is not None
    rig.step()
    assert rig.sent().step.want_slots == 5


def test_full_credit_is_asked_for_behind_the_first_prompt() -> None:
    """A session over HBM that outlived a worker put the last blocks of its only prompt out, for nothing."""
    rig = Rig(credit=8, room=4, first_credit=2)
    assert rig.sent().step.want_slots == 2
    rig.acquire(blocks=0, reserve=1)  # a warm-up
    rig.acquire(blocks=3)  # what an earlier worker left, to be copied down
    rig.step()
    assert [rig.sent().WhichOneof("body") for _ in range(2)] == ["acquire", "acquire"]
    assert rig.nothing_to_send()
    rig.acquire(blocks=3, reserve=1)
    rig.step()
    assert rig.sent().WhichOneof("body") == "acquire", "it holds its blocks before the credit is given"
    assert rig.sent().step.want_slots == 8


def test_decoding_before_any_prompt_asks_for_full_credit() -> None:
    rig = Rig(credit=8, first_credit=0)
    assert rig.nothing_to_send()
    assert rig.state.take_credit(1) is None
    rig.state.want_credit(1)
    rig.step()
    assert rig.sent().step.want_slots == 8


@pytest.mark.parametrize(
    "pages, free, first, full",
    [(0, 0, 0, 0), (16, 16, 4, 4), (4096, 4096, 256, 256), (4096, 200, 72, 256), (4096, 100, 0, 256)],
)
def test_the_first_credit_leaves_what_is_cached(pages: int, free: int, first: int, full: int) -> None:
    targets = Targets.for_pages(pages, free, 1 << 20)
    assert (targets.first_credit, targets.credit) == (first, full)


@pytest.mark.parametrize(
    "pages, dram_slots, room",
    [(408, 128, 16), (408, 1 << 20, 102), (4096, 2048, 256), (1 << 16, 1 << 16, 512)],
)
def test_room_in_hand_is_a_part_of_dram(pages: int, dram_slots: int, room: int) -> None:
    """An engine with 408 pages kept 102 of 128 slots of DRAM in hand, in which nothing could be cached."""
    assert Targets.for_pages(pages, 0, dram_slots).room == room


def test_paused_credit_goes_back() -> None:
    rig = Rig(credit=4)
    rig.sent()
    rig.answer(slots=pb.Slots(hbm_slots=u32(1, 2).tobytes(), hbm_generations=u32(1, 1).tobytes()))
    rig.state.pause_credit()
    message = rig.sent()
    assert u32_of(message.step.released_hbm).tolist() == [1, 2]
    assert message.step.want_slots == 0
    rig.state.resume_credit()
    rig.step()
    assert rig.sent().step.want_slots == 4


def test_a_resume_states_and_sends_again_what_was_not_answered() -> None:
    rig = Rig()
    rig.acquire(3)
    rig.grant(rig.sent(), u32(3, 4, 5))
    pending = rig.acquire(1, lease=2)
    first = rig.sent()
    rig.step(seals=seals_of(3), dropped=u32(4))
    step = rig.sent()
    assert (first.id, step.id) == (2, 3)
    rig.state.close_stream()
    statement = rig.state.statement()
    assert statement.hbm.slots.tolist() == [3, 4, 5]  # 4 is released by a message that may have been lost
    rig.stream = rig.state.open_stream()
    again = rig.sent()
    assert again.WhichOneof("body") == "acquire"
    assert again.acquire.lease == 2
    step = rig.sent()
    assert records_of(step.step.seals, SEAL)["slot"].tolist() == [3]
    assert u32_of(step.step.released_hbm).tolist() == [4]
    assert step.step.seen == 0
    rig.grant(again, u32(9))
    assert pending.result(0).hbm_slots.tolist() == [9]


def test_a_release_sent_again_spares_what_was_granted_in_between() -> None:
    """After a resume the repeated release took a slot away that had been granted again before the stream was lost."""
    rig = Rig()
    rig.acquire(1, lease=1)
    rig.grant(rig.sent(), u32(3))
    rig.acquire(1, lease=2)
    second = rig.sent()
    rig.step(dropped=u32(3))
    rig.sent()
    rig.grant(second, u32(3))
    rig.reconnect()
    step = rig.sent()
    assert not step.step.released_hbm
    assert rig.state.hbm.held[3]


def test_a_release_sent_again_spares_what_the_new_stream_grants_before_it() -> None:
    """A repeated release left with the `seen` of the moment: it took away what was granted just before."""
    rig = Rig()
    rig.acquire(1, lease=1)
    rig.grant(rig.sent(), u32(3))
    rig.acquire(1, lease=2)
    rig.sent()
    rig.step(dropped=u32(3))
    rig.sent()
    rig.reconnect()
    rig.grant(rig.sent(), u32(3))  # the acquire, sent again, hits the block whose release comes behind it
    step = rig.sent()
    assert u32_of(step.step.released_hbm).tolist() == [3]
    assert step.step.seen == 0  # so the daemon skips it: rule B
    rig.step(dropped=u32(3))
    assert rig.sent().step.seen > 0


def test_a_release_that_waits_through_two_resumes_spares_what_was_granted_in_between() -> None:
    """The second resume looked at what was sent alone: a release still queued from the first took a new grant away."""
    rig = Rig()
    rig.acquire(1, lease=1)
    rig.grant(rig.sent(), u32(3))
    rig.step(dropped=u32(3))
    rig.sent()
    rig.reconnect()  # the release is queued again, and this stream does not live to send it
    rig.answer(slots=pb.Slots(hbm_slots=u32(3).tobytes(), hbm_generations=u32(2).tobytes()))
    rig.state.close_stream()
    assert rig.state.statement().hbm.generations.tolist() == [2]
    rig.stream = rig.state.open_stream()
    assert not rig.sent().step.released_hbm
    assert rig.state.hbm.held[3]


def test_a_stream_that_is_gone_takes_nothing() -> None:
    rig = Rig()
    old = rig.stream
    rig.reconnect()
    rig.acquire()
    assert rig.state.next_message(old) is None
    assert rig.sent().WhichOneof("body") == "acquire"


def test_what_the_daemon_does_not_hold_is_lost() -> None:
    rig = Rig()
    rig.acquire()
    rig.grant(rig.sent(), u32(3, 4))
    rig.state.lose(u32(4), u32())
    (event,) = rig.state.poll()
    assert isinstance(event, Lost)
    assert event.hbm_slots.tolist() == [4]
    rig.step(dropped=u32(3, 4))
    assert u32_of(rig.sent().step.released_hbm).tolist() == [3]


def test_a_session_that_is_gone_fails_its_grants_and_loses_all() -> None:
    rig = Rig()
    rig.acquire()
    rig.grant(rig.sent(), u32(3, 4))
    sent, queued = rig.acquire(lease=2), rig.acquire(lease=3)
    rig.sent()
    rig.step(seals=seals_of(3))
    rig.state.close_stream()
    rig.state.forget("gone")
    for grant in (sent, queued):
        with pytest.raises(Aborted):
            grant.result(0)
    assert not rig.state.idle()  # the request still uses its pages
    rig.state.drop(rig.state.hbm, u32(3, 4))
    assert rig.state.idle()
    rig.state.renew(SHAPE, 16)
    rig.stream = rig.state.open_stream()
    assert rig.nothing_to_send()


def test_an_acquire_fails_fast_while_the_daemon_is_away() -> None:
    rig = Rig(breaker_s=60.0)
    rig.state.close_stream()
    early = rig.acquire()
    assert not early.done()
    assert rig.state._away_since is not None
    rig.state._away_since -= 60.0
    assert not rig.state.available
    late = rig.acquire()
    assert isinstance(late.error, Unavailable)
    rig.stream = rig.state.open_stream()
    assert rig.state.available
    rig.grant(rig.sent(), u32(1, 2))
    assert early.result(0).hbm_slots.tolist() == [1, 2]


def test_a_silent_daemon_opens_the_breaker_and_its_answer_closes_it() -> None:
    """A stopped daemon keeps its stream open: only an answer that does not come tells."""
    rig = Rig(breaker_s=60.0)
    slow = rig.acquire()
    message = rig.sent()
    assert rig.state.available
    slow.sent_at -= 60.0
    assert not rig.state.available
    assert isinstance(rig.acquire().error, Unavailable)
    rig.grant(message, u32(1, 2))
    assert slow.done()
    assert rig.state.available


def test_a_refused_acquire_raises_what_refused_it() -> None:
    rig = Rig()
    grant = rig.acquire()
    refusal = pb.StreamError(id=rig.sent().id, code=8, message="full", retry_after_ms=250)
    rig.answer(error=refusal)
    with pytest.raises(ResourceExhausted, match="full") as caught:
        grant.result(0)
    assert caught.value.retry_after_s == 0.25


def test_seal_results_reach_the_listener_while_the_slot_is_still_held() -> None:
    rig = Rig()
    heard: list[tuple[list[int], list[int]]] = []

    class Heard(Listener):
        def sealed(self, result: SealResult) -> None:
            heard.append((result.outcomes.tolist(), rig.state.hbm.references[result.seals["slot"]].tolist()))

    rig.state.listener = Heard()
    rig.acquire(1)
    rig.grant(rig.sent(), u32(3))
    rig.state.stage(seals_of(3), NO_COPIES, NO_COPIES, u32(3), u32())
    rig.step()
    rig.answer(step_result=pb.StepResult(id=rig.sent().id, seal_outcomes=b"\1"))
    assert heard == [([1], [1])]


def test_changed_leases_wake_whoever_waits() -> None:
    rig = Rig()
    rig.state.poll()
    assert not rig.state.wait(0.01)
    rig.answer(changed=pb.Changed(leases=[4, 5]))
    assert rig.state.wait(30)
    assert rig.state.poll() == [Changed(leases=(4, 5))]


def test_unanswered_messages_are_bounded() -> None:
    rig = Rig()
    rig.acquire(1)
    message = rig.sent()
    rig.grant(message, u32(1))
    rig.answer(slots=pb.Slots(dram_slots=u32(0).tobytes(), dram_generations=u32(1).tobytes()))
    copies = np.zeros(1, dtype=COPY)
    for _ in range(3000):
        rig.step(stores=copies)
        rig.sent()
    assert len(rig.state._outbox._sent) <= 1024


def test_a_cancel_is_sent_once() -> None:
    rig = Rig()
    rig.state.put(Cancel(lease=9))
    assert rig.sent().cancel.lease == 9
    rig.reconnect()
    assert rig.nothing_to_send()
