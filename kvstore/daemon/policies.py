"""The policies of DRAM and disk: which, by the configuration, and what status says of them. Owner loop only."""

from __future__ import annotations

from typing import Any

from eviction.base import Chooser
from eviction.factory import policy_factory
from eviction.reuse_ages import ReuseAges
from kvstore.config import ServeConfig
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.layout import Tier
from kvstore.store import Store
from kvstore.tiering.next_turns import CLASSES, NextTurns
from kvstore.victims.ranking import Rankings
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["STORE_ORDER", "begin_policies", "policy_fields", "resize_policies"]

STORE_ORDER = "lru"
"""Tail-first LRU is the store's own key: a tier that goes by it has no policy beside it."""
_TURNS = 1 << 16
"""Of conversations that are remembered for what they teach."""


def begin_policies(store: Store, config: ServeConfig) -> None:
    """Each tier gets the policy that is configured, and prefetch what it goes by.

    Raises: ConfigError for a name that is not registered.
    """
    if config.nvme and config.prefetch_percent:
        store.prefetching.turns = NextTurns(config.max_rows, ReuseAges(CLASSES, _TURNS))
    nvme_bytes = sum(path.capacity_bytes for path in config.nvme)
    for tier, key, name, nbytes in (
        (Tier.DRAM, "dram_policy", config.dram_policy, config.dram_bytes),
        (Tier.NVME, "nvme_policy", config.nvme_policy, nvme_bytes),
    ):
        try:
            factory = policy_factory(name)
        except InvalidArgument as error:
            raise ConfigError(f"{key}: {error.message}") from None
        if name != STORE_ORDER and nbytes:
            store.hints.rankings.rank(tier, name, factory, nbytes)


def resize_policies(rankings: Rankings, dram_bytes: int, nvme_bytes: int) -> None:
    """The tiers have these sizes now: where one is new, its policy begins anew."""
    for tier, nbytes in ((Tier.DRAM, dram_bytes), (Tier.NVME, nvme_bytes)):
        ranking = rankings.get(tier)
        if ranking is not None:
            ranking.resize(nbytes)


def policy_fields(rankings: Rankings, tier: Tier) -> dict[str, Any]:
    """Fields of TierStats: whose order the tier is in, and what a policy that chooses says of its candidates."""
    ranking = rankings.get(tier)
    if ranking is None:
        return {"policy": STORE_ORDER}
    policy: object = ranking.policy
    if not isinstance(policy, Chooser):
        return {"policy": ranking.name}
    shadows = [pb.ShadowHits(policy=name, hit_rate=rate) for name, rate in policy.hit_rates().items()]
    return {"policy": ranking.name, "in_charge": policy.in_charge, "shadows": shadows}
