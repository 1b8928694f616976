"""What clients say they decided: it is shown by session, by prompt and in the recorder, checked, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.daemon.counters import Counters
from kvstore.daemon.decisions import Decisions
from kvstore.daemon.session import Session
from kvstore.errors import InvalidArgument
from kvstore.moves import NamespaceId
from kvstore.recorder import Event, RingRecorder, describe, read_ring, ring_bytes
from kvstore.wire.v1 import kvstore_pb2 as pb


class Rig:
    def __init__(self) -> None:
        self.memory = memoryview(bytearray(ring_bytes(64)))
        self.counters = Counters()
        self.warnings: dict[str, str] = {}
        self.decisions = Decisions(self.counters, RingRecorder(self.memory, lambda: 0), self.warnings)
        self.session = session()

    def decide(self, **changes: object) -> None:
        values: dict[str, object] = {
            "namespace": 3,
            "block": b"b" * 16,
            "way": pb.LOAD_WAY_COMPUTE,
            "cached_blocks": 128,
            "loaded_blocks": 96,
            "tier": "nvme",
            "bytes_per_s": 0.4e9,
        }
        decision = pb.LoadDecision(**(values | changes))  # type: ignore[arg-type]
        self.decisions.decided(self.session, pb.ClientMessage(id=1, decision=decision))

    def change(self, **values: object) -> None:
        change = pb.TierChange(**values)  # type: ignore[arg-type]
        self.decisions.tier_changed(self.session, pb.ClientMessage(id=1, tier_change=change))


def session() -> Session:
    made = Session.__new__(Session)
    made.id, made.name, made.namespaces = 5, "engine", {3: NamespaceId(7)}  # type: ignore[assignment]
    return made


def test_a_decision_is_shown_by_session_and_by_prompt() -> None:
    rig = Rig()
    rig.decide()
    words = "loaded 96 of 128 blocks from nvme or nearer, computed 32: disk 0.4 GB/s"
    stats = rig.decisions.of_session(rig.session.id)
    assert stats is not None
    assert (stats.compute_requests, stats.loaded_blocks, stats.computed_blocks) == (1, 96, 32)
    assert stats.last == words
    assert rig.counters.values()["plan_computed_blocks_total"] == 32
    chain = np.frombuffer(b"a" * 16 + b"b" * 16 + b"c" * 16, dtype=np.uint64).reshape(3, 2)
    assert rig.decisions.explain(NamespaceId(7), chain) == words
    assert rig.decisions.explain(NamespaceId(8), chain) == ""
    assert rig.decisions.explain(NamespaceId(7), chain[:1]) == ""
    (record,) = read_ring(rig.memory)
    assert record.event is Event.PLAN
    assert describe(record) == {
        "session": 5,
        "count": 128,
        "loaded": 96,
        "tier": "nvme",
        "bytes_per_s": 400_000_000,
        "block": (b"b" * 16).hex(),
    }


def test_a_tier_out_of_use_is_a_warning_until_it_is_used_again_or_its_session_ends() -> None:
    rig = Rig()
    rig.change(tier="dram", use=pb.TIER_USE_OUT, spent_s=1.5, saved_s=0.25, pause_s=60.0)
    assert list(rig.warnings.values()) == [
        "engine has taken dram out of use for 1m: it cost 1.50 s and saved 0.25 s"
    ]
    rig.change(tier="dram", use=pb.TIER_USE_TRIAL)
    stats = rig.decisions.of_session(rig.session.id)
    assert stats is not None
    assert ([change.use for change in stats.tiers], rig.warnings) == ([pb.TIER_USE_TRIAL], {})
    rig.change(tier="dram", use=pb.TIER_USE_IN_USE)
    assert not stats.tiers
    rig.change(tier="nvme", use=pb.TIER_USE_OUT, pause_s=1.0)
    rig.decisions.session_ended(rig.session)
    assert rig.warnings == {}
    assert rig.decisions.of_session(rig.session.id) is None


@pytest.mark.parametrize(
    "wrong",
    [{"namespace": 4}, {"block": b"short"}, {"tier": "tape"}, {"loaded_blocks": 129}, {"way": 17}],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument):
        rig.decide(**wrong)
    assert rig.decisions.of_session(rig.session.id) is None


def test_the_number_of_decisions_that_are_remembered_is_bounded() -> None:
    rig = Rig()
    for number in range(5_000):
        rig.decide(block=number.to_bytes(16, "little"))
    first = np.zeros((1, 2), dtype=np.uint64)
    assert rig.decisions.explain(NamespaceId(7), first) == ""
    last = np.array([[4_999, 0]], dtype=np.uint64)
    assert rig.decisions.explain(NamespaceId(7), last)
