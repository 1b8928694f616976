"""The two contracts of a tier: memory that processes map, and storage that is reached by moves.

`MemoryTier` owns extents (memfds) by their number in the extents table and says where they lie in this process.
`StorageTier` carries out moves (`kvstore.wire.packed.MOVE`) between one memory tier and itself. Decorators
(`tiers.decorators`) wrap a StorageTier; implementations know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE_BYTES", "MemoryTier", "Moves", "Replies", "StorageTier"]

PAGE_BYTES = 4096
"""Alignment of slots, in memory and on disk."""

Moves = NDArray[np.void]  # MOVE[n]
Replies = NDArray[np.void]  # REPLY[n]


class MemoryTier(Protocol):
    """Extents of memory, each one memfd. One owner thread changes it; reading is safe from any thread.

    Addresses and views of an extent are valid until `drop`: the caller drops an extent only when nothing uses it.
    """

    def create(self, extent: int, nbytes: int) -> int:
        """Makes and maps an extent of zeros; the descriptor, which stays the tier's.

        Raises ResourceExhausted where memory is short, before anything is changed; AlreadyExists for a known extent.
        """
        ...

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        """Maps an extent that somebody else made. `fd` is taken and closed, also on failure: the mapping is enough.

        Raises InvalidArgument where it is not sealed against resizing or is shorter than `nbytes`.
        """
        ...

    def descriptor(self, extent: int) -> int:
        """The memfd of an extent that this tier created. Raises NotFound."""
        ...

    def view(self, extent: int) -> memoryview:
        """All of the extent's bytes, writable. Raises NotFound."""
        ...

    def addresses(self, extents: NDArray[np.uint16], offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Where bytes lie in this process: [n]. O(n). Raises NotFound when an extent is not mapped."""
        ...

    def drop(self, extent: int) -> None:
        """Unmaps the extent, closes its descriptor if it has one; memory goes when nobody has it. Raises NotFound."""
        ...

    def close(self) -> None:
        """Drops everything."""
        ...


class StorageTier(Protocol):
    """Slots behind moves. Safe for several threads, with the exception of `open_slab`, `drop_slab` and `close`."""

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """Makes extent `extent` ready: the slab `number` of this storage, created where it does not exist.

        `nbytes` is its size on the medium, trailers included; `number` names it for ever, `extent` in this process.
        Raises ResourceExhausted where there is no room, KvstoreError with one line for any other fault.
        """
        ...

    def drop_slab(self, extent: int) -> None:
        """Deletes the slab and gives its room back. Raises NotFound."""
        ...

    def pieces(self, moves: Moves) -> Sequence[Moves]:
        """`moves` in pieces that are each worth one `transfer` by one thread. Order is free, none is lost."""
        ...

    def transfer(self, moves: Moves) -> Replies:
        """Carries out `moves` and answers each, in any order; blocks. A move's own fault is its status, never an error.

        READ: OK only where every byte and the identity (hash, namespace, length, generation) are what was written.
        WRITE: the payload's checksum is in the reply.
        """
        ...

    def sync(self) -> None:
        """Returns when every write answered before this call is on the medium. Raises OSError if it is not."""
        ...

    def close(self) -> None:
        """Closes files. What was written stays."""
        ...
