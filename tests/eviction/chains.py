"""Prompts as policies see them: chains of blocks that share heads, numbered by what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eviction.base import Policy, Rows, Stop, Use

__all__ = ["Cache", "prompts", "use_of"]

MOST_BLOCKS = 4096


def prompts(seed: int, count: int, *, conversations: int = 12, growth: int = 4) -> Iterator[Rows]:
    """Conversations that grow turn by turn over one shared head, each going on as long as chance has it."""
    rng = np.random.default_rng(seed)
    head, next_block = [0, 1], 2
    chains: list[list[int]] = [[] for _ in range(conversations)]
    for _ in range(count):
        which = int(rng.integers(conversations) * rng.random())
        if not chains[which] or rng.random() < 0.1:
            chains[which] = list(head)
        new = int(rng.integers(1, growth + 1))
        chains[which] += range(next_block, next_block + new)
        next_block += new
        assert next_block < MOST_BLOCKS
        yield np.array(chains[which], dtype=np.uint32)


def use_of(rows: Rows, fresh: NDArray[np.bool_], now_s: float, stop: Stop = Stop.UNKNOWN) -> Use:
    """A whole prompt, whose blocks are named by their rows."""
    return Use(
        rows=rows,
        fresh=fresh,
        names=rows.astype(np.uint64),
        depths=np.arange(len(rows), dtype=np.uint32),
        now_s=now_s,
        prompt_blocks=len(rows),
        stop=stop,
    )


@dataclass(slots=True)
class Cache:
    """What is cached, beside a policy that is told of it."""

    policy: Policy
    capacity: int
    here: NDArray[np.bool_]
    now_s: float = 0.0
    asked: int = 0
    hits: int = 0

    @classmethod
    def of(cls, policy: Policy, capacity: int, rows: int = MOST_BLOCKS) -> Cache:
        return cls(policy, capacity, np.zeros(rows, dtype=np.bool_))

    def serve(
        self,
        rows: Rows,
        stop: Stop = Stop.UNKNOWN,
        waiting: Sequence[Rows] | None = None,
        step_s: float = 1.0,
    ) -> Rows:
        """One request: looked up, used, then down to the capacity. Returns what was evicted."""
        self.now_s += step_s
        fresh = ~self.here[rows]
        self.asked += len(rows)
        self.hits += int(fresh.argmax()) if fresh.any() else len(rows)
        self.policy.use(use_of(rows, fresh, self.now_s, stop))
        self.here[rows] = True
        if waiting is not None:
            self.policy.expect(waiting)
        gone = self.policy.victims(max(len(self.policy) - self.capacity, 0), self.now_s)
        assert self.here[gone].all()
        self.here[gone] = False
        assert len(self.policy) == int(self.here.sum()) <= self.capacity
        return gone

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked
