"""What the store is told when an answer has ended: how soon its conversation goes on, as far as the reason says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Ending
from kvstore.client import Namespace, Session, StopReason

__all__ = ["say_ended"]

_TOOL_PRIORITY = 50
"""In the middle of 1 to 100: an engine's own ranges have room above and below."""
_TOOL_MS = 60_000
"""Most tools have answered by then. Of all that was tried on traces of agents, keeping what waits for a tool for a
minute was the best simple rule at every size of a cache."""


def say_ended(session: Session, namespace: Namespace, hashes: NDArray[np.uint64], ending: Ending) -> None:
    """`hashes` [n, 2]: the chain of prompt and answer. Never waits; holds nothing."""
    session.step()  # what was sealed last is among them
    if ending is Ending.TOOL_USE:
        session.retain(namespace, hashes, stop=StopReason.TOOL_USE, priority=_TOOL_PRIORITY, ttl_ms=_TOOL_MS)
    else:  # which also ends what an earlier turn's tool had retained
        session.retain(namespace, hashes, stop=StopReason.END_TURN)
