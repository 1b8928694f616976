"""The policies that order the blocks of DRAM and NVMe, where a tier has one: told of uses, asked for victims.

A policy is told of a prompt as a whole, once, when its request is given all that it asked for: of what is cached and
of what it will compute alike, so that the blocks of a prompt are of one age and go tail first, in whatever order they
come into the tier. Calls of the store only note it, at the cost of an append; the policies are told in the background
or before the next victims are named, whichever is sooner.

So a policy may know blocks that the tier has not got yet, or never gets: those it names are passed over and forgotten.
Of blocks that no prompt was given (answers, what a session without HBM of ours seals) it hears when they come. What it
was never told of (blocks of an earlier daemon, or found on disk) are *strangers*: none was used since the policy began,
so they go before all that it knows, by the store's own order. So a start costs nothing, and loses none of it.

A policy that breaks its contract (`kvstore.victims.policy_border`) orders nothing from then on: the tier has none, and
goes by the store's own key, which is tail-first LRU.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Policy, PolicyFactory, Stop, Use
from kvstore.layout import GENERATION_SHIFT, NONE, Columns, State, Tier, states
from kvstore.moves import U32, Grant
from kvstore.tables.slots import SlotPool
from kvstore.victims.policy_border import Guarded, PolicyFault, raised_in

__all__ = ["Ranking", "Rankings"]

_REMEMBERED_LEASES = 8192
_MOST_NOTED = 1 << 14
"""Notes that wait. More come only where the background has not run for long; the oldest are then never told."""
_TOLD_A_TICK = 1 << 12
"""Blocks: what a turn of the background may take, a millisecond or two."""
_RESIZED_BY = 0.25
_NO_ROWS: U32 = np.empty(0, dtype=np.uint32)


class Ranking:
    """The policy of one tier. Arrays of rows have no duplicates and no NONE."""

    __slots__ = (
        "_capacity_bytes",
        "_column",
        "_columns",
        "_factory",
        "_failed",
        "_policy",
        "_pool",
        "_told",
        "all_known",
        "name",
    )

    def __init__(
        self,
        name: str,
        factory: PolicyFactory,
        capacity_bytes: int,
        pool: SlotPool,
        columns: Columns,
        failed: Callable[[PolicyFault], None],
    ) -> None:
        """`capacity_bytes` is the size of the tier, in which there may be no memory yet; `failed` takes the tier's
        policy away, at once and for good."""
        self.name = name
        self._factory = factory
        self._capacity_bytes = capacity_bytes
        self._pool = pool
        self._columns = columns
        self._column: U32 = columns.dram if pool.tier is Tier.DRAM else columns.nvme
        self._failed = failed
        self._policy: Guarded | None = None  # made when the first block tells how large blocks are
        self._told: U32 = np.zeros(columns.shape.max_rows, dtype=np.uint32)
        """[rows] the generation plus one under which the policy knows a row; 0: it does not."""
        self.all_known = False
        """The last look for strangers found none that may go."""

    def __len__(self) -> int:
        return 0 if self._policy is None else len(self._policy)

    @property
    def policy(self) -> Policy | None:
        """None before the first block."""
        return None if self._policy is None else self._policy.policy

    def resize(self, capacity_bytes: int) -> None:
        """The tier has another size. By much: the policy begins anew, and what it knew are strangers."""
        if abs(capacity_bytes - self._capacity_bytes) > _RESIZED_BY * self._capacity_bytes:
            self._capacity_bytes = capacity_bytes
            self._policy = None
            self._told[:] = 0
            self.all_known = False

    def knows(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether the policy was told of the block that each row is now."""
        known: NDArray[np.bool_] = self._told[rows] == self._marks(rows)
        return known

    def used(self, rows: U32, now_s: float, prompt_blocks: int) -> None:
        """A prompt with these blocks, its head first, is served: what the tier has, or is about to get, is used."""
        fresh = ~self.knows(rows)
        if fresh.any():
            mine = ~fresh | (self._column[rows] != NONE)
            if self._pool.tier is Tier.DRAM:
                mine |= (
                    self._columns.nvme[rows] == NONE
                )  # computed now; what NVMe alone has comes by promotion
            else:
                mine[:] = True
            rows, fresh = rows[mine], fresh[mine]
        if not len(rows) or not self._is_made(rows):
            return
        self._forget(rows[fresh & (self._told[rows] != 0)])  # other blocks in the same rows
        policy = self._policy
        if policy is None:  # it failed just now
            return
        policy.use(
            Use(
                rows=rows,
                fresh=fresh,
                names=self._columns.hash[rows, 0],
                depths=self._columns.depth[rows],
                now_s=now_s,
                prompt_blocks=prompt_blocks,
            )
        )
        self._told[rows] = self._marks(rows)

    def ended(self, rows: U32, stop: Stop) -> None:
        """The answer to a prompt of these blocks ended, for that reason."""
        if self._policy is not None:
            self._policy.ended(rows[self.knows(rows)], stop)

    def victims(self, count: int, now_s: float, may_go: MayGo) -> U32:
        """Up to `count` slots that the policy names, of those for which `may_go` ([n] slots → [n]); it knows them no
        more, so all must go now."""
        if self._policy is None:
            return _NO_ROWS
        gone: list[U32] = []

        def good(rows: U32) -> NDArray[np.bool_]:
            slots = self._column[rows]
            here: NDArray[np.bool_] = (slots != NONE) & self.knows(rows)
            if here.all():
                return may_go(slots)
            gone.append(rows[~here & ~self._may_come(rows)])
            here[here] = may_go(slots[here])
            return here

        rows = self._policy.victims(count, now_s, good)
        slots: U32 = self._column[rows]
        self._told[rows] = 0
        if gone:
            self._forget(np.unique(np.concatenate(gone)))
        return slots

    def left(self, rows: U32) -> None:
        """The tier has let these go: what the policy knows of them it did not name itself."""
        self._forget(rows[self.knows(rows)])

    def _may_come(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether each block that the tier has not may be on its way down to it."""
        columns = self._columns
        above: NDArray[np.bool_] = states(columns.state[rows]) == State.FILLING
        above |= (columns.hbm[:, rows] != NONE).any(axis=0)
        if self._pool.tier is Tier.NVME:
            above |= columns.dram[rows] != NONE
        found: NDArray[np.bool_] = above & self.knows(rows)
        return found

    def _forget(self, rows: U32) -> None:
        if self._policy is not None and len(rows):
            self._policy.remove(rows)
            self._told[rows] = 0

    def _marks(self, rows: U32) -> U32:
        generations: U32 = (self._columns.state[rows] >> GENERATION_SHIFT).astype(np.uint32)
        return generations + np.uint32(1)

    def _is_made(self, rows: U32) -> bool:
        if self._policy is None:
            slots = self._column[rows]
            slots = slots[slots != NONE]
            if not len(slots):
                return False
            blocks = self._capacity_bytes // int(self._pool.slot_bytes(slots[:1])[0])
            try:
                made = self._factory(rows=len(self._column), capacity_blocks=max(blocks, 1))
            except Exception as error:  # noqa: BLE001 (code of others: the tier goes on without it)
                self.fail(raised_in("its constructor", error))
                return False
            self._policy = Guarded(made, len(self._column), self.fail)
        return True

    def fail(self, what: str) -> None:
        """The policy did what it must not: it is asked nothing more, and the tier has none."""
        self._policy = None
        self._told[:] = 0
        self._failed(PolicyFault(tier=self._pool.tier, policy=self.name, what=what))

    def check_integrity(self) -> None:
        """Raises AssertionError where the policy's parts contradict each other, or what it was told. O(rows)."""
        if self._policy is not None:
            self._policy.policy.check_integrity()
            assert np.count_nonzero(self._told) == len(self._policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """A request's prompt. The rows were of its leading blocks when it was given them."""

    rows: U32
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    rows: U32
    stop: Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class _Came:
    tier: Tier
    slots: U32


class Rankings:
    """The rankings of all tiers that have one, and what is still to be told."""

    __slots__ = ("_by_tier", "_columns", "_expected", "_noted", "_pools", "_served", "_wanted", "faults")

    def __init__(self, columns: Columns, dram: SlotPool, nvme: SlotPool, wanted: NDArray[np.uint32]) -> None:
        """`wanted`: [rows] how many queued requests will ask for each."""
        self._columns = columns
        self._pools = {Tier.DRAM: dram, Tier.NVME: nvme}
        self._wanted = wanted
        self._by_tier: dict[Tier, Ranking] = {}
        self._noted: deque[_Served | _Ended | _Came] = deque(maxlen=_MOST_NOTED)
        self._served: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._expected: list[U32] = []
        """Rows that came into DRAM for a queued request: it tells of them."""
        self.faults: dict[Tier, PolicyFault] = {}
        """Of tiers whose policy was taken away."""

    def __iter__(self) -> Iterator[tuple[Tier, Ranking]]:
        return iter(self._by_tier.items())

    def get(self, tier: Tier) -> Ranking | None:
        """Who orders a tier; None: the store's own key."""
        return self._by_tier.get(tier)

    def rank(self, tier: Tier, name: str, factory: PolicyFactory, capacity_bytes: int) -> None:
        """From now on a policy orders the tier, DRAM or NVMe, which has this size; blocks in it are strangers."""
        self.faults.pop(tier, None)
        self._by_tier[tier] = Ranking(
            name, factory, capacity_bytes, self._pools[tier], self._columns, self._failed
        )

    def _failed(self, fault: PolicyFault) -> None:
        self._by_tier.pop(fault.tier, None)
        self.faults.setdefault(fault.tier, fault)  # the first counts: what comes of it is no other

    # -- notes

    def served(self, session: int, lease: int, rows: U32, grant: Grant) -> None:
        """A request was answered for its prompt, [n] rows (NONE: a block without one). The first time that it is given
        all that it asked for counts."""
        if not self._by_tier or (session, lease) in self._served or not grant.complete:
            return
        self._served[session, lease] = None
        if len(self._served) > _REMEMBERED_LEASES:
            self._served.popitem(last=False)
        self._noted.append(_Served(rows=rows, blocks=len(rows)))

    def came(self, tier: Tier, slots: U32) -> None:
        """Blocks have come into slots of a tier."""
        if tier in self._by_tier and len(slots):
            self._noted.append(_Came(tier=tier, slots=slots))

    def ended(self, rows: U32, stop: Stop) -> None:
        """The answer to a prompt of these blocks (NONE: a block without a row) ended, for that reason."""
        if self._by_tier:
            self._noted.append(_Ended(rows=rows, stop=stop))

    def strangers_came(self, tier: Tier) -> None:
        """A tier has blocks that its policy will not be told of."""
        ranking = self._by_tier.get(tier)
        if ranking is not None:
            ranking.all_known = False

    def forget_session(self, session: int) -> None:
        """The next session of its number numbers its leases anew."""
        for key in [key for key in self._served if key[0] == session]:
            del self._served[key]

    def tick(self, now_ms: int) -> None:
        """The background's turn: tells some of what was noted."""
        if self._noted:
            self.tell(now_ms / 1000, _TOLD_A_TICK)
        if self._expected:
            rows, self._expected = np.unique(np.concatenate(self._expected)), []
            self._tell_came(Tier.DRAM, rows, now_ms / 1000)

    def tell(self, now_s: float, most_blocks: int | None = None) -> None:
        """Tells the policies what was noted, in order, until about so many blocks were told."""
        left = most_blocks
        while self._noted and (left is None or left > 0):
            note = self._noted.popleft()
            if isinstance(note, _Served):
                rows = note.rows[note.rows != NONE]
                told = len(rows)
                for ranking in tuple(self._by_tier.values()):  # one may fail, and is taken out then
                    ranking.used(rows, now_s, note.blocks)
            elif isinstance(note, _Ended):
                rows = note.rows[note.rows != NONE]
                told = len(rows)
                for ranking in tuple(self._by_tier.values()):
                    ranking.ended(rows, note.stop)
            else:
                slots = self._came_with(note)
                told = len(slots)
                rows = self._pools[note.tier].row[slots[self._pools[note.tier].sealed(slots)]]
                self._tell_came(note.tier, np.unique(rows[rows != NONE]), now_s)
            left = None if left is None else left - told

    def _came_with(self, first: _Came) -> U32:
        """The slots of a note and of those like it behind it: blocks come a few at a time, and a call has its price."""
        parts = [first.slots]
        while self._noted and isinstance(self._noted[0], _Came) and self._noted[0].tier is first.tier:
            note = self._noted.popleft()
            assert isinstance(note, _Came)
            parts.append(note.slots)
        return np.concatenate(parts) if len(parts) > 1 else first.slots

    def _tell_came(self, tier: Tier, rows: U32, now_s: float) -> None:
        """What came and was not told of with its prompt is used now; what a queued request waits for it will tell."""
        ranking = self._by_tier.get(tier)
        if ranking is None:  # its policy was taken away since this was noted
            return
        rows = rows[~ranking.knows(rows)]
        if tier is Tier.DRAM and len(rows):
            awaited = self._wanted[rows] > 0
            if awaited.any():
                self._expected.append(rows[awaited])
                rows = rows[~awaited]
        if len(rows):
            rows = rows[np.argsort(self._columns.depth[rows], kind="stable")]
            ranking.used(rows, now_s, len(rows))

    def check_integrity(self) -> None:
        """Raises AssertionError where a policy's parts contradict each other. O(slots)."""
        for ranking in self._by_tier.values():
            ranking.check_integrity()
