"""A process of a session that makes no calls: it presents itself, maps, and gives its shard of HBM when it is asked.

One thread joins, again where the session was renewed; afterwards any thread reads, while a thread of the descriptor
socket maps what comes.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.client.descriptors import Descriptors, MappedMemory
from kvstore.client.device import DeviceSpec
from kvstore.client.group import Shard
from kvstore.client.memory import DramListener, HbmMemory
from kvstore.errors import FailedPrecondition, KvstoreError, Unavailable
from kvstore.faults import fault
from kvstore.wire import descriptors as wire
from tiers.base import Device, Sharing

__all__ = ["MemberMemory"]

_LOG = logging.getLogger("kvstore.client")
_PAGES_STEP_S = 0.2

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class MemberMemory:
    """The memory of one member."""

    def __init__(
        self,
        shard: Shard,
        hbm_bytes: int,
        device: Device,
        *,
        timeout_s: float,
        listener: DramListener | None = None,
    ) -> None:
        """`device` was opened by the caller, who closes it afterwards; `hbm_bytes` is the budget on it."""
        self._shard = shard
        self._hbm_bytes = hbm_bytes
        self._device = device
        self._timeout_s = timeout_s
        self._listener = listener
        self._descriptors: _MemberDescriptors | None = None
        self._memory: MappedMemory | None = None
        self._slot_bytes = 0

    def join(self, path: str, token: bytes, slot_bytes: int, device: int) -> None:
        """Presents this process as a member of the session of `token`, and maps what it is sent.

        `slot_bytes`: of a whole block; `device`: the number under which the tables have the session's HBM. Of a session
        before that: its pages stay where they are, the new ones come into their place. Raises: as
        `Descriptors.open`.
        """
        old = self._memory
        if self._descriptors is not None:
            self._descriptors.close()
        self._slot_bytes = slot_bytes
        self._descriptors = _MemberDescriptors(
            path,
            token,
            slot_bytes=slot_bytes,
            spec=DeviceSpec(hbm_bytes=self._hbm_bytes, index=device, kind=self._device.kind),
            device=self._device,
            timeout_s=self._timeout_s,
            hbm_range=None if old is None else old.hbm,
            listener=self._listener,
            shard=self._shard,
        )
        self._memory = self._descriptors.open()
        if old is not None:
            old.dram.close()

    def wait_pages(self, num_pages: int) -> None:
        """Returns when so many pages are mapped. Raises: Unavailable at the time-out."""
        deadline = time.monotonic() + self._timeout_s
        while self.hbm.num_pages < num_pages:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.hbm.num_pages} of {num_pages} pages came within {self._timeout_s} s"
                )
            self._require().wait_news(_PAGES_STEP_S)

    @property
    def hbm(self) -> HbmMemory:
        """This member's shard of the HBM. Raises: FailedPrecondition before `join`."""
        if self._memory is None or self._memory.hbm is None:
            raise FailedPrecondition("this process has joined no session yet")
        return self._memory.hbm

    def pages_of(self, slots: U32) -> NDArray[np.int32]:
        """[n] pages of slots. Waits for extents that are on their way. Raises: Unavailable where they do not come."""
        self._wait_mapped(slots, np.empty(0, dtype=np.uint32))
        return self.hbm.page_of(slots)

    def copy_addresses(self, hbm: U32, dram: U32) -> tuple[U64, U64]:
        """[n] addresses of HBM slots, and of this member's part of DRAM slots. Waits and raises as `pages_of`."""
        self._wait_mapped(hbm, dram)
        assert self._memory is not None
        parts = self._memory.dram.address_of(dram) + np.uint64(self._shard.offset(self._slot_bytes))
        return self.hbm.address_of(hbm), parts

    def close(self) -> None:
        """Ends the liveness connection, then unmaps. The device stays the caller's."""
        if self._descriptors is not None:
            self._descriptors.close()
        if self._memory is not None:
            self._memory.dram.close()
            if self._memory.hbm is not None:
                self._memory.hbm.close()

    def _require(self) -> _MemberDescriptors:
        if self._descriptors is None:
            raise FailedPrecondition("this process has joined no session yet")
        return self._descriptors

    def _wait_mapped(self, hbm: U32, dram: U32) -> None:
        descriptors, memory = self._require(), self._memory
        assert memory is not None
        if not memory.mapped(hbm, dram) and not descriptors.wait_mapped(memory, hbm, dram, self._timeout_s):
            raise Unavailable("memory of the session did not come to this process")


class _MemberDescriptors(Descriptors):
    """Gives HBM when the daemon asks for it; what it is asked while it still opens waits until then."""

    _given: deque[tuple[int, int]]  # descriptor and bytes of shards whose answer has not come

    def open(self, known: MappedMemory | None = None) -> MappedMemory:
        """See Descriptors."""
        self._given = deque()
        self._asked: list[wire.Wanted] = []
        self._opening = True
        return super().open(known)

    def wait_news(self, timeout_s: float) -> None:
        """Returns when something was mapped, or at the time-out."""
        with self._arrived:
            self._arrived.wait(timeout_s)

    def _give_missing(self, memory: MappedMemory, hbm: HbmMemory, wanted: int) -> None:
        """Nothing: see `_give`."""

    def _listen(self, memory: MappedMemory) -> None:
        self._opening = False
        try:
            for asked in self._asked:
                self._give(memory, asked)
        except OSError as error:
            _LOG.info("the descriptor socket ended: %s", error)
        super()._listen(memory)

    def _apply(self, memory: MappedMemory, received: wire.Received) -> None:
        message = received.message
        if isinstance(message, wire.Wanted):
            if self._opening:
                self._asked.append(message)
            else:
                self._give(memory, message)
        elif isinstance(message, wire.Accepted) and self._given:
            fd, nbytes = self._given.popleft()
            assert memory.hbm is not None
            memory.hbm.add(
                extent=message.extent, fd=fd, nbytes=nbytes, slot_base=message.slot_base, slots=message.slots
            )
            with self._arrived:
                self._arrived.notify_all()
        elif isinstance(message, wire.Refused) and self._given:
            assert memory.hbm is not None
            memory.hbm.tier.discard(self._given.popleft()[0])
        else:
            super()._apply(memory, received)

    def _give(self, memory: MappedMemory, asked: wire.Wanted) -> None:
        assert memory.hbm is not None
        assert self._socket is not None
        fault("member.asked")
        tier = memory.hbm.tier
        try:
            if asked.slot_bytes != memory.hbm.slot_bytes:
                raise FailedPrecondition(f"slots here have {memory.hbm.slot_bytes} bytes")
            fd = tier.new_extent(asked.nbytes)
        except KvstoreError as error:
            wire.send(self._socket, wire.Refused(text=str(error)))
            return
        kind = wire.NewPlainHbm if tier.sharing is Sharing.NONE else wire.NewHbm
        self._given.append((fd, asked.nbytes))
        wire.send(
            self._socket, kind(nbytes=asked.nbytes, slots=asked.slots, slot_bytes=asked.slot_bytes), [fd]
        )
