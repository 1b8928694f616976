"""A process of a session that maps DRAM and nothing else: a rank of an engine that keeps its HBM to itself.

It presents itself, so that the store frees nothing that it may still touch, maps the tables and what DRAM there is,
and makes no calls. One thread joins, again where the session was renewed; afterwards any thread reads, while a thread
of the descriptor socket maps what comes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.client.descriptors import Descriptors, MappedMemory
from kvstore.client.memory import DramListener
from kvstore.errors import FailedPrecondition, Unavailable
from kvstore.layout import SlotState, Tier, generations, states

__all__ = ["DramMember"]

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)


class DramMember:
    """The mapping of one member."""

    def __init__(self, number: int, *, timeout_s: float, listener: DramListener | None = None) -> None:
        """`number`: of this process in the session, 1 and above; the process that makes the calls is 0."""
        self._number = number
        self._timeout_s = timeout_s
        self._listener = listener
        self._descriptors: Descriptors | None = None
        self._memory: MappedMemory | None = None

    def join(self, path: str, token: bytes, slot_bytes: int) -> None:
        """Presents this process as a member of the session of `token`. Nothing may be copied meanwhile.

        The mapping of a session before that ends. Raises: as `Descriptors.open`.
        """
        old, self._memory = self._memory, None
        if self._descriptors is not None:
            self._descriptors.close()
        if old is not None:
            old.dram.close()
        self._descriptors = Descriptors(
            path,
            token,
            slot_bytes=slot_bytes,
            spec=None,
            device=None,
            timeout_s=self._timeout_s,
            listener=self._listener,
            member=self._number,
        )
        self._memory = self._descriptors.open()

    def address_of(self, slots: U32) -> U64:
        """[n] addresses of DRAM slots that the session holds. Waits for extents that are on their way.

        Raises: Unavailable where they do not come in time; FailedPrecondition before `join`.
        """
        memory = self._require()
        assert self._descriptors is not None
        if not memory.mapped(_NO_SLOTS, slots) and not self._descriptors.wait_mapped(
            memory, _NO_SLOTS, slots, self._timeout_s
        ):
            raise Unavailable("memory of the session did not come to this process")
        return memory.dram.address_of(slots)

    def sealed(self, slots: U32, generations_: U32) -> NDArray[np.bool_]:
        """[n] whether each slot holds, complete, what it held under that generation.

        Asked after a copy it says whether the copy is to be believed: a slot that was taken away meanwhile has another
        generation. Raises: FailedPrecondition before `join`.
        """
        words = self._require().tables.columns.pool(Tier.DRAM).state[slots]
        same: NDArray[np.bool_] = (states(words) == SlotState.SEALED) & (generations(words) == generations_)
        return same

    def close(self) -> None:
        """Ends the liveness connection, then unmaps: no copy is under way any more."""
        if self._descriptors is not None:
            self._descriptors.close()
        if self._memory is not None:
            self._memory.dram.close()
            self._memory = None

    def _require(self) -> MappedMemory:
        if self._memory is None:
            raise FailedPrecondition("this process has joined no session yet")
        return self._memory
