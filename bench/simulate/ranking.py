"""Policies that keep an order of their own, in the real store: told of what comes into a tier and is used there.

A block is told when it has come into the tier, and again whenever a later prompt finds it there; not for a prompt
that it was promoted for. Why an answer ends is told with its prompt's uses, as in the replay of policies alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Policy, Rows, Stop, Use
from kvstore.layout import Columns, Tier
from kvstore.match import slots_sealed
from kvstore.store import Store

__all__ = ["RankedStore", "Ranking"]

U32 = NDArray[np.uint32]


class RankedStore(Store):
    """A store whose tiers may have policies of their own."""

    __slots__ = ()

    def rank(self, tier: Tier, policy: Policy) -> None:
        """`policy` names the victims of DRAM or NVMe from now on."""
        self._state.rankings[tier] = policy


class Ranking:
    """A Policy of one tier with a memory of what it was told, so that rows which the store gave away are no trouble."""

    __slots__ = ("_columns", "_names", "_policy", "_tier", "_told")

    def __init__(self, policy: Policy, tier: Tier, columns: Columns) -> None:
        self._policy = policy
        self._tier = tier
        self._columns = columns
        self._told = np.zeros(columns.shape.max_rows, dtype=np.bool_)
        self._names = np.zeros(columns.shape.max_rows, dtype=np.uint64)

    def has(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether the tier has each row's block now, and the policy knows it."""
        same: NDArray[np.bool_] = self._told[rows] & (self._names[rows] == self._columns.hash[rows, 0])
        return same & self._sealed(rows)

    def tell(self, rows: U32, now_s: float, prompt_blocks: int, stop: Stop) -> None:
        """Blocks of a prompt, its head first, have come or were found; what the tier has not is passed over."""
        rows = rows[self._sealed(rows)]
        if not len(rows):
            return
        names = self._columns.hash[rows, 0]
        other = self._told[rows] & (self._names[rows] != names)  # the row has another block since
        if other.any():
            self.remove(rows[other])
        self._policy.use(
            Use(
                rows=rows,
                fresh=~self._told[rows],
                names=names,
                depths=self._columns.depth[rows],
                now_s=now_s,
                prompt_blocks=prompt_blocks,
                stop=stop,
            )
        )
        self._told[rows] = True
        self._names[rows] = names

    def _sealed(self, rows: U32) -> NDArray[np.bool_]:
        column = self._columns.dram if self._tier is Tier.DRAM else self._columns.nvme
        return slots_sealed(self._columns, self._tier, column[rows])

    # -- Policy

    def use(self, use: Use) -> None:
        """See Policy."""
        self._policy.use(use)

    def expect(self, waiting: Sequence[Rows]) -> None:
        """See Policy."""
        self._policy.expect(waiting)

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """See Policy."""
        found = self._policy.victims(count, now_s, may_go)
        self._told[found] = False
        return found

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._policy.remove(rows)
        self._told[rows] = False

    def __len__(self) -> int:
        return len(self._policy)

    def check_integrity(self) -> None:
        """Raises AssertionError where the policy's parts contradict each other, or what it was told. O(rows)."""
        self._policy.check_integrity()
        assert np.count_nonzero(self._told) == len(self._policy)
