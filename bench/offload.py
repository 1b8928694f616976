"""Blocks copied from HBM to DRAM without a pause, as write-through does: the next batch from the completion of one."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from bench.copy_places import placed
from bench.copy_sides import CopyBed
from engine_adapter.copier import Copier, CopyBatch, Direction
from kvstore.errors import DeadlineExceeded

__all__ = ["Offload"]

U64 = NDArray[np.uint64]

_UNDER_WAY = 3
_STOP_S = 30.0


class Offload:
    """Stores of scattered blocks, `_UNDER_WAY` batches at any time. One thread starts and stops it."""

    def __init__(self, bed: CopyBed, copier: Copier, block_bytes: int, batch_bytes: int) -> None:
        """`batch_bytes`: of one batch."""
        self._copier = copier
        self._block_bytes = block_bytes
        area = bed.areas[Direction.STORE]
        places = placed(area.nbytes, block_bytes, "scattered")
        self._sources: U64 = places.device + np.uint64(area.source)
        self._targets: U64 = places.host + np.uint64(area.target)
        self._batch_blocks = max(1, batch_bytes // block_bytes)
        self._at = 0
        self._changed = threading.Condition()
        self._running = False
        self._under_way = 0
        self._blocks = 0
        self._since = 0.0

    def start(self) -> None:
        """Begins."""
        with self._changed:
            self._running, self._blocks, self._under_way = True, 0, _UNDER_WAY
        self._since = time.perf_counter()
        for _ in range(_UNDER_WAY):
            self._submit()

    def stop(self) -> float:
        """Ends, and waits for what is under way; bytes a second since the start. Raises: DeadlineExceeded."""
        with self._changed:
            self._running = False
            taken = time.perf_counter() - self._since
            blocks = self._blocks
            if not self._changed.wait_for(lambda: not self._under_way, _STOP_S):
                raise DeadlineExceeded(f"stores were under way for more than {_STOP_S:g} s")
        return blocks * self._block_bytes / taken

    def _submit(self) -> None:
        with self._changed:
            begin = self._at
            end = min(begin + self._batch_blocks, len(self._sources))
            self._at = end % len(self._sources)
        batch = CopyBatch(
            direction=Direction.STORE,
            sources=self._sources[begin:end],
            targets=self._targets[begin:end],
            nbytes=self._block_bytes,
            done=lambda: self._done(end - begin),
        )
        taken = self._copier.submit(batch)
        assert taken, "the bound of a copier is above that of this benchmark"

    def _done(self, blocks: int) -> None:
        with self._changed:
            self._blocks += blocks
            running = self._running
            if not running:
                self._under_way -= 1
                self._changed.notify()
        if running:
            self._submit()
