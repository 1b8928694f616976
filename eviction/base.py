"""The eviction contracts: which of many blocks go first, decided for a batch at a time.

`Policy` keeps what it needs to know of one cache's blocks: it is told of every use, and names blocks to evict. Whoever
owns the cache tells it, in this order, of each request or each step:

    policy.use(Use(...))               the prompt's blocks: those cached are touched, the others (`fresh`) are inserted
    policy.expect([rows, ...])         optional: what the waiting requests will ask for, next first
    rows = policy.victims(count, ...)  down to the capacity again; what it names has left the policy

`EvictionPolicy` is for an owner that has an order of its blocks already and wants the first of them.

A row is a block's place in the owner's table, below the `rows` that the policy was made for; its `name` is what the
block is called when it comes back in another row, so that a policy recognises what it let go. A simulation numbers its
blocks and uses the numbers as both. Policies know nothing of tiers, slots or sessions: what may not go the owner says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chooser", "EvictionPolicy", "MayGo", "Policy", "PolicyFactory", "Rows", "Stop", "Use"]

Rows = NDArray[np.uint32]
"""[n] rows of the owner's table."""

MayGo = Callable[[Rows], NDArray[np.bool_]]
"""[n] rows → [n] whether each may be evicted now."""


class Stop(IntEnum):
    """Why the answer to a prompt ended, as far as the engine said."""

    UNKNOWN = 0
    TOOL_USE = 1
    END_TURN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Blocks of one prompt that were used together, the head of the chain first.

    In a simulation one Use is a whole request after it was served. A live store tells of what a prompt hit when it is
    acquired, and of what it computed when that is sealed. No row stands in it twice.
    """

    rows: Rows
    """[n]"""
    fresh: NDArray[np.bool_]
    """[n] True: not cached until now, and inserted; False: cached, and touched."""
    names: NDArray[np.uint64]
    """[n] 64 bits that name the block for good."""
    depths: NDArray[np.uint32]
    """[n] blocks before this one in its prompt; ascending."""
    now_s: float
    """Any clock that never goes back, the same one in all calls."""
    prompt_blocks: int
    """Of the whole prompt."""
    stop: Stop = Stop.UNKNOWN
    """Why the answer to this prompt ended; where it is not known yet, UNKNOWN."""


class Policy(Protocol):
    """Orders one cache's blocks. Deterministic: equal calls, equal answers. No call or object for a single block."""

    def use(self, use: Use, /) -> None:
        """Touches and inserts. Amortised O(n)."""
        ...

    def ended(self, rows: Rows, stop: Stop, /) -> None:
        """The answer to a prompt of these blocks ended, for that reason: what was not known yet when they were used.

        Rows that are not cached are passed over. O(n).
        """
        ...

    def expect(self, waiting: Sequence[Rows], /) -> None:
        """What the requests in the waiting queue will use, next first; replaces all that was said before.

        Rows of blocks that are not cached may stand in it (a simulation knows their numbers).
        Expected blocks go after all others, and among them those first whose next use is last.
        """
        ...

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None, /) -> Rows:
        """At most `count` cached rows, those that go first in order; they have left the policy.

        Without `may_go` fewer than `count` only where there are fewer. `may_go` it asks of a bounded number of rows
        (`eviction.look`), so that no call is long however much may not go: it may name fewer, or none, where too few of
        those may go that come first; later calls find others. What may not go stays as it is. Names that left are
        remembered as long as the policy finds use for them.
        """
        ...

    def remove(self, rows: Rows, /) -> None:
        """These left for another reason (cleared, failed). Rows that are not cached are passed over. O(n)."""
        ...

    def __len__(self) -> int:
        """Cached blocks."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError where its parts contradict each other. O(rows)."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """What a policy that follows one of several says of them."""

    in_charge: str
    """The one that it follows."""

    def hit_rates(self) -> Mapping[str, float]:
        """What each of them would have hit lately, 0 to 1, of what was asked for or of a sample; empty before any."""
        ...


class PolicyFactory(Protocol):
    """What is registered as an entry point of the group `kvstore.eviction`, under the policy's name."""

    def __call__(self, *, rows: int, capacity_blocks: int) -> Policy:
        """A policy without blocks; `rows` bounds the row numbers, `capacity_blocks` what the cache will hold."""
        ...


class EvictionPolicy(Protocol):
    """Chooses victims among keys. Deterministic, no side effect on its arguments, no call or object for one block."""

    def victims(
        self, keys: NDArray[np.uint64], eligible: NDArray[np.bool_], count: int
    ) -> NDArray[np.uint32]:
        """Positions of at most `count` eligible blocks, those that go first in order.

        `keys` (`touch_key`; the smaller goes first) and `eligible` are [n]. Fewer than `count` are returned only where
        fewer are eligible. O(n).
        """
        ...
