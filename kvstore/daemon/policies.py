"""The policies of DRAM and disk: which, by the configuration, and what status says of them. Owner loop only."""

from __future__ import annotations

from typing import Any

from eviction.base import Chooser
from eviction.factory import policy_factory
from eviction.reuse_ages import ReuseAges
from kvstore.config import ServeConfig
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.layout import Tier
from kvstore.store import Store
from kvstore.tiering.next_turns import CLASSES, NextTurns
from kvstore.victims.policy_border import raised_in
from kvstore.victims.ranking import Rankings
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["STORE_ORDER", "begin_policies", "policy_fields", "resize_policies", "say_policy_faults"]

STORE_ORDER = "lru"
"""Tail-first LRU is the store's own key: a tier that goes by it has no policy beside it."""
_LOG = Log("policies")
_TURNS = 1 << 16
"""Of conversations that are remembered for what they teach."""


def begin_policies(store: Store, config: ServeConfig) -> None:
    """Each tier gets the policy that is configured, and prefetch what it goes by.

    Raises: ConfigError for a name that is not registered, or a policy that cannot be made.
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


def say_policy_faults(owner: Owner) -> None:
    """To be called now and then: of a policy that failed the log says so once, and status from then on."""
    for tier, fault in owner.store.hints.rankings.faults.items():
        name = tier.name.lower()
        topic = f"{name}_policy"
        if topic not in owner.warnings:
            owner.counters.add("policy_faults_total")
            _LOG.error("policy failed", tier=name, policy=fault.policy, what=fault.what)
            owner.warnings[topic] = (
                f"{topic} {fault.policy} {fault.what}: {name} goes by {STORE_ORDER} until the daemon starts again"
            )


def policy_fields(rankings: Rankings, tier: Tier) -> dict[str, Any]:
    """Fields of TierStats: whose order the tier is in, and what a policy that chooses says of its candidates."""
    ranking = rankings.get(tier)
    if ranking is None:
        return {"policy": STORE_ORDER}
    policy: object = ranking.policy
    try:
        if not isinstance(policy, Chooser):
            return {"policy": ranking.name}
        shadows = [pb.ShadowHits(policy=name, hit_rate=rate) for name, rate in policy.hit_rates().items()]
        in_charge = pb.TierStats(in_charge=policy.in_charge).in_charge
    except Exception as error:  # noqa: BLE001 (code of others: the tier goes on without it)
        ranking.fail(raised_in("what it says of its candidates", error))
        return {"policy": STORE_ORDER}
    return {"policy": ranking.name, "in_charge": in_charge, "shadows": shadows}
