"""How long a request waits for blocks that others compute or load, and who computes what all of them wait for.

One engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import RequestId
from engine_adapter.blocks.entry import MAX_UNUSED_S, Entry
from kvstore.client import Namespace, Session
from kvstore.layout import Tier

__all__ = ["Patience"]


class Patience:
    """Of the requests of one engine."""

    def __init__(
        self,
        session: Session,
        namespace: Namespace,
        requests: Mapping[RequestId, Entry],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`requests` are all that the engine has, then and later."""
        self._session = session
        self._namespace = namespace
        self._requests = requests
        self._clock = clock
        self.seconds = seconds

    def renew(self, entry: Entry, prompt: NDArray[np.uint64]) -> None:
        """The request asks. While what it waits for is still being filled its patience does not end."""
        now = self._clock()
        if not entry.patience_until:
            entry.patience_until = now + self.seconds
        if now > entry.patience_until:
            ready = self._ready(prompt)
            if ready > entry.seen_blocks or self.computed_here(entry, ready):
                entry.seen_blocks, entry.patience_until = ready, now + self.seconds

    def computed_here(self, entry: Entry, block: int) -> bool:
        """Whether another request of this engine computes this block, or is about to: then it need not be done twice.

        So of 64 requests whose common prefix some other process was computing and does not, one computes it.
        """
        if block >= entry.cap_blocks:
            return False
        wanted, asked_since = entry.chain.hashes[block], self._clock() - MAX_UNUSED_S
        return any(
            other is not entry
            and other.computes(asked_since)
            and not other.lost
            and other.sealed_blocks <= block < len(other.chain)
            and bool((other.chain.hashes[block] == wanted).all())
            for other in self._requests.values()
        )

    def _ready(self, prompt: NDArray[np.uint64]) -> int:
        """Leading blocks that are in memory."""
        tiers = self._session.match(self._namespace, prompt).tiers
        on_disk = np.flatnonzero(tiers == Tier.NVME)
        return int(on_disk[0]) if len(on_disk) else len(tiers)
