"""Blocks copied while something else runs: either way without a pause, or to DRAM as many as decode itself seals.

One thread starts a load, reports steps to it and stops it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.copy_places import placed
from bench.copy_sides import CopyBed
from engine_adapter.copying.copier import Copier, CopyBatch, Direction
from kvstore.errors import DeadlineExceeded

__all__ = ["Offload", "SealedOffload", "Stores"]

U64 = NDArray[np.uint64]

_UNDER_WAY = 3
_STOP_S = 30.0


class Stores(Protocol):
    """A load of stores."""

    def start(self) -> None:
        """Begins."""
        ...

    def stepped(self, tokens: int) -> None:
        """A step of decode has ended, and computed so many tokens."""
        ...

    def stop(self) -> float:
        """Ends, and waits for what is under way; bytes a second since the start. Raises: DeadlineExceeded."""
        ...


class _Area:
    """Scattered blocks of the area of stores, in turns, and what has become of those that were submitted."""

    def __init__(self, bed: CopyBed, copier: Copier, block_bytes: int, direction: Direction) -> None:
        self._copier = copier
        self._block_bytes = block_bytes
        self._direction = direction
        area = bed.areas[direction]
        places = placed(area.nbytes, block_bytes, "scattered")
        self._sources: U64 = places.sources(direction) + np.uint64(area.source)
        self._targets: U64 = places.targets(direction) + np.uint64(area.target)
        self._at = 0
        self._changed = threading.Condition()
        self._running = False
        self._under_way = 0
        self._blocks = 0
        self._since = 0.0

    def start(self) -> None:
        """See Stores."""
        with self._changed:
            self._running, self._blocks = True, 0
        self._since = time.perf_counter()

    def stop(self) -> float:
        """See Stores."""
        with self._changed:
            self._running = False
            taken = time.perf_counter() - self._since
            blocks = self._blocks
            if not self._changed.wait_for(lambda: not self._under_way, _STOP_S):
                raise DeadlineExceeded(f"stores were under way for more than {_STOP_S:g} s")
        return blocks * self._block_bytes / taken

    def submit(self, most: int) -> int:
        """One batch of at least one block and at most `most`, ending where the area does; its blocks."""
        with self._changed:
            begin = self._at
            end = min(begin + most, len(self._sources))
            self._at = end % len(self._sources)
            self._under_way += 1
        batch = CopyBatch(
            direction=self._direction,
            sources=self._sources[begin:end],
            targets=self._targets[begin:end],
            nbytes=self._block_bytes,
            done=lambda: self._done(end - begin),
            # As an engine asks for them that compares what it loads.
            sums=np.zeros((end - begin, 2), dtype=np.uint64)
            if self._copier.takes_sums(self._block_bytes)
            else None,
        )
        taken = self._copier.submit(batch)
        assert taken, "the bound of a copier is above that of this benchmark"
        return end - begin

    def follow(self) -> None:
        """What comes after a completed batch. On the copier's thread."""

    def _done(self, blocks: int) -> None:
        with self._changed:
            self._blocks += blocks
            running = self._running
        if running:
            self.follow()
        with self._changed:  # after the next one was submitted: `stop` sees no gap between the two
            self._under_way -= 1
            self._changed.notify()


class Offload(_Area):
    """Copies without a pause: `_UNDER_WAY` batches at any time, the next one from the completion of one."""

    def __init__(
        self,
        bed: CopyBed,
        copier: Copier,
        block_bytes: int,
        batch_bytes: int,
        direction: Direction = Direction.STORE,
    ) -> None:
        """`batch_bytes`: of one batch."""
        super().__init__(bed, copier, block_bytes, direction)
        self._batch_blocks = max(1, batch_bytes // block_bytes)

    def start(self) -> None:
        """See Stores."""
        super().start()
        for _ in range(_UNDER_WAY):
            self.follow()

    def stepped(self, tokens: int) -> None:
        """See Stores: they do not depend on it."""

    def follow(self) -> None:
        """The next batch."""
        self.submit(self._batch_blocks)


class SealedOffload(_Area):
    """Stores of what decode fills: after a step as many blocks as its tokens make whole, over all sequences together.

    So sequences fill their blocks at different times, as those do that began at different times.
    """

    def __init__(self, bed: CopyBed, copier: Copier, block_bytes: int, token_bytes: int) -> None:
        """`token_bytes`: keys and values of one token."""
        super().__init__(bed, copier, block_bytes, Direction.STORE)
        self._token_bytes = token_bytes
        self._filled_bytes = 0

    def stepped(self, tokens: int) -> None:
        """See Stores."""
        self._filled_bytes += tokens * self._token_bytes
        blocks, self._filled_bytes = divmod(self._filled_bytes, self._block_bytes)
        while blocks:
            blocks -= self.submit(blocks)
