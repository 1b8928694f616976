"""Tenants as they are configured: what each may take of a tier, what is kept for it, how it uses the cache. Pure.

A tenant is the part `tenant` of a namespace (kvstore/identity.py). All namespaces that state none, or one that the
configuration does not name, are of the tenant `*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cache_use import CacheUse
from kvstore.errors import ConfigError
from kvstore.units import format_size

__all__ = ["MAX_TENANTS", "OTHERS", "Tenant", "check_reserves", "check_tenants"]

_TIERS = ("hbm", "dram", "nvme")

OTHERS = "*"
MAX_TENANTS = 64
"""Named in the configuration: each is a line of status and a label of metrics."""
_MAX_NAME_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant. What counts are complete blocks, in bytes of their slots, over all devices or paths of a tier."""

    name: str
    hbm_quota_bytes: int = 0
    """More than this is taken back first when anybody needs room; 0: no quota."""
    dram_quota_bytes: int = 0
    nvme_quota_bytes: int = 0
    hbm_reserve_bytes: int = 0
    """So much no other tenant's need takes from it."""
    dram_reserve_bytes: int = 0
    nvme_reserve_bytes: int = 0
    cache: CacheUse = CacheUse.ON

    def __post_init__(self) -> None:
        name = self.name
        if not name.isprintable() or not name.strip() or len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"tenants: {name!r} is no name: printable, at most {_MAX_NAME_BYTES} bytes")
        quotas, reserves = self.quotas_bytes, self.reserves_bytes
        for tier, quota, reserve in zip(_TIERS, quotas, reserves, strict=True):
            if quota and reserve > quota:
                raise ConfigError(
                    f"tenants.{name}.{tier}_reserve: {format_size(reserve)} is more than the quota of "
                    f"{format_size(quota)}"
                )

    @property
    def quotas_bytes(self) -> tuple[int, int, int]:
        """Of HBM, DRAM and NVMe (`kvstore.layout.Tier`); 0: none."""
        return (self.hbm_quota_bytes, self.dram_quota_bytes, self.nvme_quota_bytes)

    @property
    def reserves_bytes(self) -> tuple[int, int, int]:
        """Of HBM, DRAM and NVMe."""
        return (self.hbm_reserve_bytes, self.dram_reserve_bytes, self.nvme_reserve_bytes)


def check_tenants(tenants: Sequence[Tenant]) -> None:
    """Raises ConfigError for too many."""
    if len(tenants) > MAX_TENANTS:
        raise ConfigError(f"tenants: {len(tenants)} are named, at most {MAX_TENANTS}")


def check_reserves(tenants: Sequence[Tenant], name: str, capacity_bytes: int) -> None:
    """Raises ConfigError where more is promised than the tier of this name has."""
    promised = sum(tenant.reserves_bytes[_TIERS.index(name)] for tenant in tenants)
    if promised > capacity_bytes:
        raise ConfigError(
            f"{name}: its {format_size(capacity_bytes)} are less than the {format_size(promised)} that tenants have "
            f"reserved: lower their {name}_reserve, or give more"
        )
