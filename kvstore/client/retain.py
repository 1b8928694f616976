"""What an engine knows of the next use of blocks, as it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Retain", "StopReason"]


class StopReason(Enum):
    """Why an answer ended."""

    UNKNOWN = pb.STOP_REASON_UNKNOWN
    TOOL_USE = pb.STOP_REASON_TOOL_USE
    """It called a tool: the next turn comes when that is through."""
    END_TURN = pb.STOP_REASON_END_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain:
    """Of blocks [first, last) of a chain; `last` 0: to its end."""

    namespace: int
    hashes: NDArray[np.uint64]  # [n, 2] the whole chain
    first: int = 0
    last: int = 0
    stop: StopReason = StopReason.UNKNOWN
    priority: int = 0
    """1 to 100: above every block of less for `ttl_ms`; 0: none."""
    ttl_ms: int = 0

    def encode(self, message_id: int) -> pb.ClientMessage:
        """On the wire."""
        return pb.ClientMessage(
            id=message_id,
            retain=pb.Retain(
                namespace=self.namespace,
                hashes=self.hashes.tobytes(),
                first=self.first,
                last=self.last,
                stop=self.stop.value,
                priority=self.priority,
                ttl_ms=self.ttl_ms,
            ),
        )
