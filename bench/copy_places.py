"""Where blocks of `bench copy` lie within their areas: anywhere, in runs, as pages of larger blocks, or just one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction

__all__ = ["PATTERNS", "Places", "placed"]

U64 = NDArray[np.uint64]

PATTERNS = ("scattered", "pages", "runs", "one")
_RUN_BLOCKS = 8
_PAGED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """[n] offsets of blocks of `nbytes` within the areas of a direction."""

    host: U64
    device: U64
    nbytes: int

    def __len__(self) -> int:
        return len(self.host)

    @property
    def total_bytes(self) -> int:
        """Of all blocks."""
        return len(self) * self.nbytes

    def sources(self, direction: Direction) -> U64:
        """[n] where a direction reads."""
        return self.host if direction is Direction.LOAD else self.device

    def targets(self, direction: Direction) -> U64:
        """[n] where it writes."""
        return self.device if direction is Direction.LOAD else self.host


def placed(nbytes: int, block_bytes: int, pattern: str) -> Places:
    """Blocks that fill `nbytes` of each side.

    `pages`: on the host in runs of 1 MiB, as the layers of one block, and anywhere on the device; `runs`: eight
    neighbours on both sides.
    """
    rng = np.random.default_rng(block_bytes)
    count = 1 if pattern == "one" else nbytes // block_bytes
    paged = max(1, min(_PAGED_BYTES, nbytes) // block_bytes)
    steps = {"runs": (_RUN_BLOCKS, _RUN_BLOCKS), "pages": (paged, 1)}
    host, device = (_shuffled(rng, count, block_bytes, step) for step in steps.get(pattern, (1, 1)))
    both = min(len(host), len(device))
    return Places(host=host[:both], device=device[:both], nbytes=block_bytes)


def _shuffled(rng: np.random.Generator, count: int, block_bytes: int, step: int) -> U64:
    """Groups of `step` neighbours in any order."""
    groups = rng.permutation(count // step)
    slots = (groups[:, None] * step + np.arange(step)).ravel().astype(np.uint64)
    return slots * np.uint64(block_bytes)
