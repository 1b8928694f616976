"""What a path's mover has and has not answered: which moves write, how many bytes they are, and the load that it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.config import NvmeThrottle
from kvstore.moves import MoveKind
from kvstore.tiering.striping import STRIPE_BYTES, PathLoad
from kvstore.units import MIB

__all__ = ["Outstanding", "longest_answer_s"]

_MOST_WRITES = 768
"""Of the moves that a mover may have (`MoverLink.room`): reads find a place however slow writes are."""
_LARGE_CALL_BYTES = 16 * MIB  # as much as one call may move, or one slot and the debt of the one before
_CALLS = 2
_FIRST_WRITES = 8  # before the size of a block is known
_FIRST_EARLY = 2
_LEAST_EARLY = 4  # blocks: a disk is never idle between two answers


def longest_answer_s(throttle: NvmeThrottle | None) -> float:
    """How long a disk that is well may take to an answer because it is held back."""
    if throttle is None:
        return 0.0
    rates = (throttle.read_bytes_per_s, throttle.write_bytes_per_s)
    operations = (throttle.read_operations_per_s, throttle.write_operations_per_s)
    waits_s = [_LARGE_CALL_BYTES / rate for rate in rates if rate]
    return max([0.0, *waits_s, *(_CALLS / rate for rate in operations if rate)])


class Outstanding:
    """Moves by id; ids only grow, as the store gives them out."""

    def __init__(self) -> None:
        self.load = PathLoad()
        self._ids: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)  # [n], ascending
        self._lengths: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._is_write: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self._write_bytes = 0
        self._block_bytes = 0  # of the last write
        self._read_bytes = 0  # of the last read's block

    def sent(self, moves: NDArray[np.void], now_s: float) -> None:
        """The mover has these MOVE[] now."""
        if not len(moves):
            return
        is_write = moves["kind"] == MoveKind.WRITE
        self._ids = np.concatenate((self._ids, moves["id"]))
        self._lengths = np.concatenate((self._lengths, moves["length"]))
        self._is_write = np.concatenate((self._is_write, is_write))
        if is_write.any():
            lengths = moves["length"][is_write]
            self._write_bytes += int(lengths.sum(dtype=np.uint64))
            self._block_bytes = int(lengths[-1])
        if not is_write.all():
            self._read_bytes = int(moves["length"][~is_write][-1])
        self.load.began(int(moves["length"].sum(dtype=np.uint64)), now_s)

    def ended(self, ids: NDArray[np.uint64], now_s: float) -> NDArray[np.bool_]:
        """The mover has answered these; [n] which of them were writes. Ids that it does not have are none."""
        wrote = np.zeros(len(ids), dtype=np.bool_)
        if not len(self._ids):
            return wrote
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        known = self._ids[at] == ids
        found = at[known]
        wrote[known] = self._is_write[found]
        nbytes = int(self._lengths[found].sum(dtype=np.uint64))
        self._write_bytes -= int(self._lengths[found[self._is_write[found]]].sum(dtype=np.uint64))
        kept = np.ones(len(self._ids), dtype=np.bool_)
        kept[found] = False
        self._ids, self._lengths = self._ids[kept], self._lengths[kept]
        self._is_write = self._is_write[kept]
        self.load.ended(nbytes, now_s)
        return wrote

    def lost(self) -> None:
        """The mover is gone with all that it had."""
        self._ids, self._lengths, self._is_write = self._ids[:0], self._lengths[:0], self._is_write[:0]
        self._write_bytes = 0
        self.load.lost()

    @property
    def newest(self) -> int:
        """The last of the moves that the mover has; 0 where it has none."""
        return int(self._ids[-1]) if len(self._ids) else 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def write_room(self) -> int:
        """How many more writes it should be given now."""
        most = _MOST_WRITES - int(np.count_nonzero(self._is_write))
        if not self._block_bytes:
            return min(most, _FIRST_WRITES)
        return max(0, min(most, (self.load.ahead_bytes - self._write_bytes) // self._block_bytes))

    @property
    def early_room(self) -> int:
        """How many more blocks it should be given to read that nobody waits for yet."""
        if not self._read_bytes:
            return _FIRST_EARLY
        most = max(self.load.early_bytes, _LEAST_EARLY * self._read_bytes)
        return max(0, (most - (self.load.outstanding_bytes - self._write_bytes)) // self._read_bytes)

    @property
    def stripe(self) -> int:
        """Writes that go to one path at a time."""
        return max(1, STRIPE_BYTES // self._block_bytes) if self._block_bytes else _FIRST_WRITES
