"""What a session tells its engine besides grants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Changed", "Event", "Lost", "SealResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """All that these leases waited for has come or failed: acquire again."""

    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealResult:
    """What became of seals, one element each."""

    seals: NDArray[np.void]  # SEAL[n], as they were given to `Session.step`
    outcomes: NDArray[np.uint8]  # [n] kvstore.moves.SealOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Slots that are in local use and no longer this session's: whatever uses them has to be computed again."""

    hbm_slots: NDArray[np.uint32]
    dram_slots: NDArray[np.uint32]


Event = Changed | SealResult | Lost
