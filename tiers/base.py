"""The contracts of a tier: memory that processes map, a device's own memory, and storage that is reached by moves.

`MemoryTier` owns extents (memfds) by their number in the extents table and says where they lie in this process.
`DeviceTier` does so for the HBM of one device, or its twin, in one address range; `Device` is what it comes from.
`StorageTier` carries out moves (`kvstore.wire.packed.MOVE`) between one memory tier and itself. Decorators
(`tiers.decorators`) wrap a StorageTier; implementations know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PAGE_BYTES",
    "Device",
    "DeviceTier",
    "MemoryTier",
    "Moves",
    "Replies",
    "Sharing",
    "Spans",
    "StorageTier",
]

PAGE_BYTES = 4096
"""Alignment of slots, in memory and on disk."""

Moves = NDArray[np.void]  # MOVE[n]
Replies = NDArray[np.void]  # REPLY[n]


@dataclass(frozen=True, slots=True)
class Spans:
    """Where extents lie in this process, by their numbers: [m] addresses, 0 where none is mapped, and [m] bytes."""

    bases: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


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

    def spans(self) -> Spans:
        """All extents as they are now, by number; later changes may or may not show in it."""
        ...

    def drop(self, extent: int) -> None:
        """Unmaps the extent, closes its descriptor if it has one; memory goes when nobody has it. Raises NotFound."""
        ...

    def close(self) -> None:
        """Drops everything."""
        ...


class Sharing(Enum):
    """Whether a device's memory can be handed to other processes, and so outlive the one that made it."""

    DESCRIPTORS = "descriptors"
    """Each extent has a descriptor that carries its memory."""
    NONE = "none"
    """Plain memory of this process: its descriptor is a placeholder, and the memory goes with the process."""


class DeviceTier(Protocol):
    """The HBM extents of one device that this process maps, in one reserved address range, back to back.

    An extent lies in the first gap that is large enough, so extents that are whole numbers of slots form one strided
    array. Addresses are the device's: only on a twin may the host touch them. One owner thread changes it, whichever
    that is at the time; reading is safe from any thread. An extent is dropped only when nothing uses it.
    """

    @property
    def device(self) -> str:
        """Where the addresses are valid, as torch says it: "cpu" or "cuda:0"."""
        ...

    @property
    def sharing(self) -> Sharing:
        """Whether what `new_extent` makes can outlive this process."""
        ...

    @property
    def base(self) -> int:
        """Address of the range."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the range: address space, which takes no memory."""
        ...

    def new_extent(self, nbytes: int) -> int:
        """Makes memory and a descriptor of it, which is the caller's until `adopt` or `discard`; maps nothing.

        Raises ResourceExhausted where the device is short of memory, InvalidArgument for a size that is no multiple of
        the device's granularity.
        """
        ...

    def discard(self, fd: int) -> None:
        """Lets go of memory that was made and not adopted. `fd` is closed."""
        ...

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        """Maps an extent, made here or by another process. `fd` is taken and closed, also on failure.

        Raises AlreadyExists for a known extent, ResourceExhausted where the range is full, InvalidArgument where the
        descriptor is no memory of this device of that size.
        """
        ...

    def adopt_all(self, extents: Sequence[tuple[int, int, int]]) -> None:
        """As `adopt` for each (extent, fd, nbytes), one behind the other. Several are mapped at once where that pays.

        Raises as `adopt`; then all descriptors are closed, and those that could be mapped are.
        """
        ...

    def offset(self, extent: int) -> int:
        """Bytes from `base` to the extent. Raises NotFound."""
        ...

    def extents(self) -> dict[int, int]:
        """Bytes of each mapped extent."""
        ...

    def read(self, address: int, nbytes: int) -> bytes:
        """A copy of mapped memory, on the host. Waits for it; not for the request path."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copies from the host into mapped memory. Waits for it; not for the request path."""
        ...

    def drop(self, extent: int) -> None:
        """Unmaps the extent; its memory goes when nobody has it. Raises NotFound."""
        ...

    def close(self) -> None:
        """Drops everything and gives the address range back."""
        ...


class Device(Protocol):
    """A device, or its twin, that this process has opened."""

    @property
    def kind(self) -> str:
        """ "twin" or "cuda"."""
        ...

    @property
    def uuid(self) -> str:
        """Name of the hardware for ever; empty for a twin."""
        ...

    @property
    def identity(self) -> str:
        """What must be equal for memory that an earlier process left to be believed: hardware, boot and driver."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Extents are whole multiples of this."""
        ...

    @property
    def extent_bytes(self) -> int:
        """A good size of an extent, of which `slots_per_extent` makes a whole number of slots."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be taken now."""
        ...

    def reserve(self, capacity_bytes: int) -> DeviceTier:
        """An empty tier with address space for `capacity_bytes`."""
        ...

    def close(self) -> None:
        """Lets go of the device, after its tiers were closed."""
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

    def calls(self, moves: Moves) -> int:
        """How many operations of the medium `moves` are."""
        ...

    def transfer(self, moves: Moves) -> Replies:
        """Carries out `moves` and answers each, in any order; blocks. A move's own fault is its status, never an error.

        READ: OK only where every byte and the identity (hash, namespace, length, generation) are what was written; of
        a move that is `unread` only where the identity is: its reply has the checksum that its bytes should have.
        WRITE: the payload's checksum is in the reply; of an unread one the one that it was given.
        """
        ...

    def sync(self) -> None:
        """Returns when every write answered before this call is on the medium. Raises OSError if it is not."""
        ...

    def close(self) -> None:
        """Closes files. What was written stays."""
        ...
