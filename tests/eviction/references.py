"""Policies block by block, as their papers have them, in lists: slow, and so plain that they can be checked by reading.

A request's blocks come tail first. All of them are touched or inserted before any is evicted, which is what the
contract has; everything else is as in the paper.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

__all__ = ["REFERENCES", "Reference"]


class Reference:
    """One policy: blocks of a request, tail first, then so many victims."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        raise NotImplementedError

    def evict(self) -> int:
        raise NotImplementedError


class LruReference(Reference):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        for block in blocks:
            self.blocks.pop(block, None)
            self.blocks[block] = None

    def evict(self) -> int:
        return self.blocks.popitem(last=False)[0]


class SieveReference(Reference):
    """NSDI 2024, algorithm 1: a queue, a hand, a bit."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []  # the oldest first
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        for block in blocks:
            self.visited[block] = not fresh[block]
            if fresh[block]:
                self.queue.append(block)

    def evict(self) -> int:
        while True:
            if self.hand >= len(self.queue):
                self.hand = 0
            block = self.queue[self.hand]
            if not self.visited[block]:
                return self.queue.pop(self.hand)
            self.visited[block] = False
            self.hand += 1


class S3FifoReference(Reference):
    """SOSP 2023, algorithm 1: a block leaves the small queue for the main one when it was used more than once there."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.uses: dict[int, int] = {}
        self.small_most = max(capacity // 10, 1)

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        for block in blocks:
            if not fresh[block]:
                self.uses[block] = min(self.uses[block] + 1, 3)
        # What was a ghost goes to the main queue; each queue gets its own in the order in which they come.
        for block in blocks:
            if fresh[block]:
                self.uses[block] = 0
                if block in self.ghosts:
                    del self.ghosts[block]
                    self.main.append(block)
                else:
                    self.small.append(block)

    def evict(self) -> int:
        while True:
            if len(self.small) > self.small_most or not self.main:
                block = self.small.popleft()
                if self.uses[block] > 1:
                    self.uses[block] = 0
                    self.main.append(block)
                    continue
                self.ghosts[block] = None
                while len(self.ghosts) > max(self.capacity - self.small_most, 1):
                    self.ghosts.popitem(last=False)
                return block
            block = self.main.popleft()
            if not self.uses[block]:
                return block
            self.uses[block] -= 1
            self.main.append(block)


class ArcReference(Reference):
    """FAST 2003, figure 4; a request's ghosts move the share by the lengths that the lists had before it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.once: OrderedDict[int, None] = OrderedDict()
        self.again: OrderedDict[int, None] = OrderedDict()
        self.once_left: OrderedDict[int, None] = OrderedDict()
        self.again_left: OrderedDict[int, None] = OrderedDict()
        self.share = 0.0

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        many_once, many_again = max(len(self.once_left), 1), max(len(self.again_left), 1)
        for block in blocks:
            if not fresh[block]:
                self.once.pop(block, None)
                self.again.pop(block, None)
                self.again[block] = None
            elif block in self.once_left:
                self.share += max(1.0, many_again / many_once)
                del self.once_left[block]
                self.again[block] = None
            elif block in self.again_left:
                self.share -= max(1.0, many_once / many_again)
                del self.again_left[block]
                self.again[block] = None
            else:
                self.once[block] = None
        self.share = min(max(self.share, 0.0), float(self.capacity))

    def evict(self) -> int:
        if self.once and (len(self.once) > int(self.share) or not self.again):
            block = self.once.popitem(last=False)[0]
            self.once_left[block] = None
        else:
            block = self.again.popitem(last=False)[0]
            self.again_left[block] = None
        return block

    def trim(self) -> None:
        """After the request: |T1| + |B1| ≤ c, and all four ≤ 2c."""
        while len(self.once_left) > max(self.capacity - len(self.once), 0):
            self.once_left.popitem(last=False)
        rest = 2 * self.capacity - len(self.once) - len(self.again) - len(self.once_left)
        while len(self.again_left) > max(rest, 0):
            self.again_left.popitem(last=False)


class GdsfReference(Reference):
    """The least of clock + uses × cost, searched among all; values rounded to a quarter of an octave."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clock = 0.0
        self.uses: dict[int, int] = {}
        self.key: dict[int, tuple[float, int]] = {}
        self.serial = 0

    def use(self, blocks: list[int], fresh: dict[int, bool]) -> None:
        depth = len(blocks)
        for block in blocks:
            depth -= 1
            self.uses[block] = 1 if fresh[block] else self.uses[block] + 1
            value = self.uses[block] * (1 + depth / 64)
            self.key[block] = (self.clock + _rounded(value), self.serial)
            self.serial += 1

    def evict(self) -> int:
        block = min(self.key, key=self.key.__getitem__)
        self.clock = max(self.clock, self.key.pop(block)[0])
        return block


def _rounded(value: float) -> float:
    return float(2 ** (round(math.log2(value) * 4) / 4))


REFERENCES: dict[str, type[Reference]] = {
    "arc": ArcReference,
    "gdsf": GdsfReference,
    "lru": LruReference,
    "s3fifo": S3FifoReference,
    "sieve": SieveReference,
}
