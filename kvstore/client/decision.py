"""What a client tells of its own decisions: hints for people, which change nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import Tier
from kvstore.planning.guard import Use
from kvstore.planning.planner import Way
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Decision", "TierChange"]

_WAYS = {
    Way.LOAD: pb.LOAD_WAY_LOAD,
    Way.COMPUTE: pb.LOAD_WAY_COMPUTE,
    Way.BOTH_ENDS: pb.LOAD_WAY_BOTH_ENDS,
}
_USES = {Use.IN_USE: pb.TIER_USE_IN_USE, Use.TRIAL: pb.TIER_USE_TRIAL, Use.OUT: pb.TIER_USE_OUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How a request gets the part of its cached prefix that is below HBM; `LoadDecision` of the protocol."""

    namespace: int
    block: bytes
    way: Way
    cached_blocks: int
    loaded_blocks: int
    tier: Tier
    bytes_per_s: float
    expected_s: float
    load_all_s: float
    compute_all_s: float

    def encode(self, message_id: int) -> pb.ClientMessage:
        """As the stream carries it."""
        decision = pb.LoadDecision(
            namespace=self.namespace,
            block=self.block,
            way=_WAYS[self.way],
            cached_blocks=self.cached_blocks,
            loaded_blocks=self.loaded_blocks,
            tier=self.tier.name.lower(),
            bytes_per_s=self.bytes_per_s,
            expected_s=self.expected_s,
            load_all_s=self.load_all_s,
            compute_all_s=self.compute_all_s,
        )
        return pb.ClientMessage(id=message_id, decision=decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChange:
    """A tier that this client has taken out of use, or back; `TierChange` of the protocol."""

    tier: Tier
    use: Use
    spent_s: float
    saved_s: float
    pause_s: float

    def encode(self, message_id: int) -> pb.ClientMessage:
        """As the stream carries it."""
        change = pb.TierChange(
            tier=self.tier.name.lower(),
            use=_USES[self.use],
            spent_s=self.spent_s,
            saved_s=self.saved_s,
            pause_s=self.pause_s,
        )
        return pb.ClientMessage(id=message_id, tier_change=change)
