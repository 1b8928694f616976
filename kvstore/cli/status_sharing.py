"""What `kvstore status` says of tenants, and of a cache that is not in use in full."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cache_use import CacheUse
from kvstore.units import format_count, format_size
from kvstore.wire.cache_use import cache_use_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["sharing_parts", "sharing_values", "use_of", "used_for"]

_TIERS = ("hbm", "dram", "nvme")
_TENANT_FIELDS = tuple(field.name for field in pb.TenantStats.DESCRIPTOR.fields if field.name != "tiers")
_TENANT_TIER_FIELDS = tuple(
    field.name for field in pb.TenantTierStats.DESCRIPTOR.fields if field.name != "tier"
)
_STATES = {
    CacheUse.ON: "ready",
    CacheUse.READ: "ready, and stores nothing",
    CacheUse.WRITE: "ready, and gives no hits",
    CacheUse.OFF: "paused",
    CacheUse.DRY_RUN: "in a dry run",
}


def use_of(number: int) -> CacheUse:
    """What a reply says; ON where an older daemon says nothing."""
    return cache_use_of(number, CacheUse.ON)


def used_for(stats: pb.StatsReply) -> str:
    """The state of the service in a few words."""
    return _STATES[use_of(stats.cache_use)]


def sharing_values(stats: pb.StatsReply) -> Mapping[str, object]:
    """For `--json`."""
    return {
        "cache": use_of(stats.cache_use).value,
        "restricted": [
            {
                "tenant": item.tenant or None,
                "namespace": item.digest.hex() or None,
                "cache": use_of(item.cache_use).value,
            }
            for item in stats.restricted
        ],
        "dry_run": {
            "asked_blocks": _asked(stats),
            **{f"would_hit_{tier}": _would_hit(stats, tier) for tier in _TIERS},
        },
        "tenants": [
            {
                **{name: getattr(tenant, name) for name in _TENANT_FIELDS},
                "tiers": {
                    tier.tier: {name: getattr(tier, name) for name in _TENANT_TIER_FIELDS}
                    for tier in tenant.tiers
                },
            }
            for tenant in stats.tenants
        ],
    }


def sharing_parts(stats: pb.StatsReply) -> list[RenderableType]:
    """For people; nothing where no tenants are configured and the cache is in use for all."""
    parts: list[RenderableType] = [_tenants(stats)] if stats.tenants else []
    lines = [
        f"{'tenant ' + item.tenant if item.tenant else 'namespace ' + item.digest.hex()}: cache "
        f"{use_of(item.cache_use).value}"
        for item in stats.restricted
    ]
    bypassing = [item for item in stats.sessions if use_of(item.cache_use) is not CacheUse.ON]
    lines += [
        f"session {item.session} ({item.name}): cache {use_of(item.cache_use).value}" for item in bypassing
    ]
    if asked := _asked(stats):
        hits = {tier: _would_hit(stats, tier) for tier in _TIERS}
        tiers = ", ".join(f"{tier} {count / asked:.1%}" for tier, count in hits.items() if count)
        lines.append(
            f"dry run: would have hit {sum(hits.values()) / asked:.1%} of {format_count(asked)} blocks"
            + (f" ({tiers})" if tiers else "")
        )
    return parts + ([Text("\n".join(lines) + "\n")] if lines else [])


def _asked(stats: pb.StatsReply) -> int:
    """Blocks that were asked for in dry runs."""
    return stats.counters.get("blocks_dry_run", 0)


def _would_hit(stats: pb.StatsReply, tier: str) -> int:
    return stats.counters.get(f"blocks_would_hit_{tier}", 0)


def _tenants(stats: pb.StatsReply) -> Table:
    """Used of quota, and what is reserved, of each tier; fits 80 columns."""
    table = Table(title="tenants", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tenant", overflow="fold")
    for header in ("tier", "used", "quota", "reserve", "evicted", "hits"):
        table.add_column(header, justify="left" if header == "tier" else "right")
    for tenant in stats.tenants:
        rate = f"{tenant.hit_blocks / tenant.asked_blocks:.1%}" if tenant.asked_blocks else "-"
        shown = [tier for tier in tenant.tiers if tier.used_bytes or tier.quota_bytes or tier.reserve_bytes]
        for row, tier in enumerate(shown or tenant.tiers[:1]):
            over = tier.quota_bytes and tier.used_bytes > tier.quota_bytes
            table.add_row(
                tenant.tenant if not row else "",
                tier.tier,
                Text(format_size(tier.used_bytes), style="yellow" if over else ""),
                format_size(tier.quota_bytes) if tier.quota_bytes else "-",
                format_size(tier.reserve_bytes) if tier.reserve_bytes else "-",
                format_count(tier.evicted_blocks),
                rate if not row else "",
            )
    return table
