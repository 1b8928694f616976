"""What the store is told of blocks that a request has computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Namespace, Session
from kvstore.layout import Tier
from kvstore.wire.packed import SEAL

__all__ = ["seals"]


def seals(
    session: Session,
    namespace: Namespace,
    hashes: NDArray[np.uint64],
    slots: NDArray[np.uint32],
    blocks: range,
) -> NDArray[np.void]:
    """SEAL[len(blocks)] of these blocks of a chain ([n, 2]) whose block table are `slots` [n or more]."""
    begin, end = blocks.start, blocks.stop
    records = np.zeros(end - begin, dtype=SEAL)
    records["slot"] = slots[begin:end]
    records["generation"] = session.generations_of(Tier.HBM, slots[begin:end])
    records["namespace"] = namespace.handle
    records["depth"] = np.arange(begin, end, dtype=np.uint32)
    records["hash"] = hashes[begin:end]
    records["parent"][1 if begin == 0 else 0 :] = hashes[max(0, begin - 1) : end - 1]
    return records
