"""What status says of the policies that choose among others."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["policy_lines", "policy_values"]


def policy_values(tier: pb.TierStats) -> dict[str, object]:
    """For `--json`."""
    return {
        "policy": tier.policy,
        "in_charge": tier.in_charge,
        "shadows": {shadow.policy: shadow.hit_rate for shadow in tier.shadows},
    }


def policy_lines(tiers: Sequence[pb.TierStats]) -> list[str]:
    """One a tier whose policy is not LRU."""
    found = []
    for tier in tiers:
        if tier.policy in ("", "lru"):
            continue
        line = f"{tier.tier} goes by {tier.policy}"
        if tier.in_charge:
            line += f", which follows {tier.in_charge}"
        if tier.shadows:
            rates = ", ".join(f"{shadow.policy} {shadow.hit_rate:.1%}" for shadow in tier.shadows)
            line += f"; of what was asked for lately would have hit: {rates}"
        found.append(line)
    return found
