"""What an admitted request starts with, from the store's answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Admission
from kvstore.layout import Tier
from kvstore.moves import Outcome

__all__ = ["admission"]


def admission(outcomes: NDArray[np.uint8], found: NDArray[np.uint8], block_tokens: int) -> Admission:
    """Of hits alone, `outcomes` [n]. `found`: tiers when it was enqueued: a prefetch may have brought them up since."""
    tiers = np.where(outcomes == Outcome.HIT_HBM, Tier.HBM, Tier.DRAM)
    early = found[: len(tiers)]
    tiers[: len(early)] = np.where(early == Tier.NVME, Tier.NVME, tiers[: len(early)])
    tokens = {tier.name.lower(): int((tiers == tier).sum()) * block_tokens for tier in Tier}
    return Admission(
        cached_tokens=len(outcomes) * block_tokens,
        cached_by_tier={name: count for name, count in tokens.items() if count},
    )
