"""Tenants' shares of the tiers: how much each has, and who has to give when somebody needs room.

    1. tenants over their quota, among whom the one that asks counts what it asks for
    2. tenants that have more than what is reserved for them
    3. the one that asks, out of its own reserve

Nobody takes from another tenant what is reserved for it; below that the eviction policy chooses among the blocks of
those whose turn it is. What counts are complete blocks (SEALED slots). Counted as slots change, so that to ask costs
microseconds; without tenants in the configuration nothing is counted or asked. Owner only. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Columns, SlotState, Tier, states
from kvstore.moves import U32
from kvstore.tables.slots import SlotPool
from kvstore.tenant import OTHERS, Tenant

__all__ = ["ANYBODY", "Givers", "Quotas", "TenantShare", "in_turn"]

I64 = NDArray[np.int64]
Who = NDArray[np.bool_]
"""[tenants]"""

ANYBODY = -1
"""Who asks, where it is for no tenant: the background, or before quotas are asked."""
_UNBOUNDED = np.int64(1 << 62)
_NOBODYS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Givers:
    """Whose blocks may be victims now, and of how many slots the caller has to ask again."""

    who: Who
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """One tenant in one tier, for reports. Bytes; quota 0: none."""

    tenant: str
    tier: Tier
    used_bytes: int
    quota_bytes: int
    reserve_bytes: int
    evicted_blocks: int


@dataclass(slots=True)
class _Lookups:
    """Blocks that a tenant's requests asked for since the start."""

    asked: int = 0
    hit: int = 0


def in_turn(
    *, used: I64, quota: I64, reserve: I64, asks: int, asked_bytes: int, slot_bytes: int, slots: int
) -> Iterator[Givers]:
    """Those who have to give, in the order of the module: of one tier, all columns are [tenants] bytes.

    `asks`: number of the tenant that needs `asked_bytes` in all, or ANYBODY. No Givers names more `slots` than each of
    them may lose before it reaches its bound, so a caller that evicts so many of any of them and then asks again keeps
    every bound.
    """
    demand = np.zeros_like(used)
    if asks != ANYBODY:
        demand[asks] = asked_bytes
    # A slot over the quota goes as a whole, one that reaches into the reserve stays.
    over = np.minimum(-(-(used + demand - quota) // slot_bytes), (used - reserve) // slot_bytes)
    spare = (used - reserve) // slot_bytes
    for may_lose in (over, spare):
        who = may_lose > 0
        if who.any():
            yield Givers(who=who, slots=min(slots, int(may_lose[who].min())))
    if asks != ANYBODY:
        own = np.zeros(len(used), dtype=np.bool_)
        own[asks] = True
        yield Givers(who=own, slots=slots)


class Quotas:
    """See the module."""

    __slots__ = (
        "_columns",
        "_evicted",
        "_lookups",
        "_names",
        "_owners",
        "_quota",
        "_reserve",
        "_tenant_of",
        "_used",
        "active",
    )

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._tenant_of: NDArray[np.uint8] = np.zeros(columns.shape.max_namespaces, dtype=np.uint8)
        self.active = False
        """Whether there are tenants: else everything is everybody's."""
        self._owners: dict[Tier, NDArray[np.uint8]] = {}
        """[slots] of each tier: the tenant whose block each has, _NOBODYS where none is complete."""
        self._set(())

    def _set(self, tenants: Sequence[Tenant]) -> None:
        named = {tenant.name: tenant for tenant in tenants}
        others = named.pop(OTHERS, Tenant(name=OTHERS))
        every = (others, *named.values())
        self._names = tuple(tenant.name for tenant in every)
        self._quota = np.array([tenant.quotas_bytes for tenant in every], dtype=np.int64).T.copy()
        self._quota[self._quota == 0] = _UNBOUNDED
        self._reserve = np.array([tenant.reserves_bytes for tenant in every], dtype=np.int64).T.copy()
        self._used: I64 = np.zeros((len(Tier), len(every)), dtype=np.int64)
        self._evicted = np.zeros_like(self._used)
        self._lookups = [_Lookups() for _ in every]

    def configure(self, tenants: Sequence[Tenant], pools: Sequence[SlotPool]) -> None:
        """These are the tenants from now on, of whom no namespace is known yet. O(slots)."""
        self._set(tenants)
        self.active = bool(tenants)
        self._tenant_of[:] = 0
        for pool in pools:
            pool.meter = self if self.active else None
        self.recount(pools)

    def number_of(self, tenant: str) -> int:
        """By which `assign` knows a tenant: 0 for all that are not named."""
        return self._names.index(tenant) if tenant in self._names else 0

    def assign(self, namespace: int, tenant: int) -> None:
        """A namespace is of this tenant. Where there are blocks of it, `recount` has to follow."""
        self._tenant_of[namespace] = tenant

    def recount(self, pools: Sequence[SlotPool]) -> None:
        """Counts anew what each has. O(slots)."""
        if self.active:
            for pool in pools:
                self._owners[pool.tier] = np.full(len(pool), _NOBODYS, dtype=np.uint8)
                slots = _sealed(pool)
                self._owners[pool.tier][slots] = self._tenants(pool.row[slots])
            self._used = self.counted(pools)

    # -- what each has

    def counted(self, pools: Sequence[SlotPool]) -> I64:
        """[tiers, tenants] bytes, counted anew. O(slots)."""
        used = np.zeros_like(self._used)
        for pool in pools:
            slots = _sealed(pool)
            used[pool.tier] = self._bytes(pool, slots, self._tenants(pool.row[slots]))
        return used

    def faults(self, pools: Sequence[SlotPool]) -> list[str]:
        """What is counted wrong, in words."""
        if not self.active or (self._used == self.counted(pools)).all():
            return []
        return [f"tenants: {self._used.tolist()} bytes are counted, {self.counted(pools).tolist()} are there"]

    def gained(self, pool: SlotPool, slots: U32) -> None:
        """These slots, which name their rows, are complete. See kvstore.tables.slots.Meter."""
        tenants = self._tenants(pool.row[slots])
        self._owners[pool.tier][slots] = tenants
        self._used[pool.tier] += self._bytes(pool, slots, tenants)

    def lost(self, pool: SlotPool, slots: U32) -> None:
        """These are not any more."""
        owners = self._owners[pool.tier]
        self._used[pool.tier] -= self._bytes(pool, slots, owners[slots])
        owners[slots] = _NOBODYS

    def _bytes(self, pool: SlotPool, slots: U32, tenants: NDArray[np.uint8]) -> I64:
        """[tenants] bytes of these slots, which are of these tenants."""
        sizes = pool.slot_bytes(slots)
        if len(slots) and (sizes == sizes[0]).all():  # the common case stays in integers
            return np.bincount(tenants, minlength=len(self._names)) * np.int64(sizes[0])
        counted = np.bincount(tenants, weights=sizes, minlength=len(self._names))
        return counted.astype(np.int64)  # exact: below 2**53

    def _tenants(self, rows: U32) -> NDArray[np.uint8]:
        """[n] tenant of each row."""
        found: NDArray[np.uint8] = self._tenant_of[self._columns.namespace[rows]]
        return found

    # -- who gives

    def asks(self, namespace: int) -> int:
        """The number of a namespace's tenant, for `givers`; ANYBODY without tenants, or for no namespace (below 0)."""
        return int(self._tenant_of[namespace]) if self.active and namespace >= 0 else ANYBODY

    def givers(self, tier: Tier, slot_bytes: int, asks: int, asked: int, slots: int) -> Iterator[Givers]:
        """Whose slots go, in turn, where `asks` needs `asked` slots of a class in all, of which `slots` are lacking."""
        return in_turn(
            used=self._used[tier],
            quota=self._quota[tier],
            reserve=self._reserve[tier],
            asks=asks,
            asked_bytes=asked * slot_bytes,
            slot_bytes=slot_bytes,
            slots=slots,
        )

    def by_tenant(self, rows: U32) -> Iterator[tuple[int, U32]]:
        """(who asks, its rows) of each tenant, for `givers`; all at once where there are no tenants."""
        if not self.active:
            yield ANYBODY, rows
            return
        tenants = self._tenants(rows)
        for tenant in np.unique(tenants).tolist():
            yield tenant, rows[tenants == tenant]

    def of(self, who: Who, tier: Tier, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each slot has a block of one of these tenants."""
        found: NDArray[np.bool_] = _table(who)[self._owners[tier][slots]]
        return found

    def few(self, who: Who, tier: Tier, slot_bytes: int, most: int) -> U32 | None:
        """Every slot of a tier with a block of these tenants, where they are few; None for more than `most`.

        Of a tier with a million slots in a millisecond, which a sample would hardly hit.
        """
        if self._used[tier][who].sum() > most * slot_bytes:
            return None
        return np.flatnonzero(_table(who)[self._owners[tier]]).astype(np.uint32)

    def spared(self, rows: U32) -> NDArray[np.bool_]:
        """[n] which of these rows, gone through in this order, must stay: with them a tenant would lose what is
        reserved for it, in some tier."""
        stay = np.zeros(len(rows), dtype=np.bool_)
        tenants = self._tenants(rows)
        for tier in Tier:
            for tenant in np.flatnonzero(self._reserve[tier] > 0).tolist():
                own = np.flatnonzero(tenants == tenant)
                if len(own):
                    spare = self._used[tier, tenant] - self._reserve[tier, tenant]
                    sizes = self._tier_bytes(tier, rows[own])
                    stay[own] |= (np.cumsum(sizes) > spare) & (sizes > 0)
        return stay

    def _tier_bytes(self, tier: Tier, rows: U32) -> I64:
        """[n] bytes that each row has in a tier."""
        columns, pool = self._columns, self._columns.pool(tier)
        sizes = np.zeros(len(rows), dtype=np.int64)
        pointers = (
            columns.hbm if tier is Tier.HBM else (columns.dram if tier is Tier.DRAM else columns.nvme)[None]
        )
        for column in pointers:
            slots = column[rows]
            there = slots != NONE
            sizes[there] += columns.extent_slot_bytes[pool.extent[slots[there]]].astype(np.int64)
        return sizes

    def may_lose(self, tier: Tier, slot_bytes: int, base: int, slots: int) -> bool:
        """Whether so many slots from `base` on may all go without a tenant losing what is reserved for it."""
        if not self.active:
            return True
        owners = self._owners[tier][base : base + slots]
        lost = np.bincount(owners, minlength=_NOBODYS + 1)[: len(self._names)] * slot_bytes
        return bool(((lost == 0) | (lost <= self._used[tier] - self._reserve[tier])).all())

    # -- what is told

    def note_evicted(self, tier: Tier, rows: U32) -> None:
        """These were victims."""
        if self.active:
            self._evicted[tier] += np.bincount(self._tenants(rows), minlength=len(self._names))

    def note_lookup(self, namespace: int, asked: int, hit: int) -> None:
        """A request that is served has got its blocks, so many of them from the cache."""
        lookups = self._lookups[self._tenant_of[namespace]]
        lookups.asked += asked
        lookups.hit += hit

    @property
    def lookups(self) -> Mapping[str, tuple[int, int]]:
        """By tenant: blocks asked for, and those of them that were hits."""
        return {
            name: (found.asked, found.hit) for name, found in zip(self._names, self._lookups, strict=True)
        }

    def shares(self) -> list[TenantShare]:
        """Every tenant in every tier."""
        return [
            TenantShare(
                tenant=name,
                tier=tier,
                used_bytes=int(self._used[tier, number]),
                quota_bytes=int(self._quota[tier, number] % _UNBOUNDED),
                reserve_bytes=int(self._reserve[tier, number]),
                evicted_blocks=int(self._evicted[tier, number]),
            )
            for number, name in enumerate(self._names)
            for tier in Tier
        ]


def _sealed(pool: SlotPool) -> U32:
    """The complete slots."""
    return np.flatnonzero(states(pool.state) == SlotState.SEALED).astype(np.uint32)


def _table(who: Who) -> NDArray[np.bool_]:
    """[256] whether each number that may stand in `_owners` is of `who`."""
    table = np.zeros(_NOBODYS + 1, dtype=np.bool_)
    table[: len(who)] = who
    return table
