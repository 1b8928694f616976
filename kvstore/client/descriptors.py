"""The client's end of the descriptor socket: presents this process and maps what it is sent.

The socket stays open for the process's life: its end of file, together with the pidfd sent with the hello, is how the
store learns that nothing here can touch a slot any more. After the first set, a thread of its own maps extents as
they are pushed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

import numpy as np
from numpy.typing import NDArray

from kvstore.client.device import DeviceSpec, hbm_slots, slots_per_extent
from kvstore.client.group import WHOLE, Shard
from kvstore.client.memory import DramListener, DramMemory, HbmExtent, HbmMemory, SharedTables
from kvstore.client.times import PartTimes
from kvstore.client.trust import first_difference
from kvstore.errors import DeadlineExceeded, FailedPrecondition, KvstoreError, ResourceExhausted, Unavailable
from kvstore.layout import SlotState, Tier, states
from kvstore.wire import descriptors as wire
from tiers.base import Device, Sharing

__all__ = ["Descriptors", "MappedMemory"]

_LOG = logging.getLogger("kvstore.client")
_RETRY_S = 0.1
_RANGE_FACTOR = 4
"""Address space beyond a session's own budget, for extents that other sessions of the device bring."""

U32 = NDArray[np.uint32]


class MappedMemory:
    """Everything that a session maps: tables, DRAM, and HBM where it owns some."""

    __slots__ = ("dram", "hbm", "tables", "times")

    def __init__(
        self, tables: SharedTables, dram: DramMemory, hbm: HbmMemory | None, times: PartTimes
    ) -> None:
        """`times`: of mapping all of this."""
        self.tables = tables
        self.dram = dram
        self.hbm = hbm
        self.times = times

    def mapped(self, hbm: U32, dram: U32) -> bool:
        """Whether this process can reach all of these slots. O(n)."""
        return self.dram.mapped(dram) and (self.hbm is None or self.hbm.mapped(hbm))

    def free_pages(self) -> int:
        """Pages of HBM that held nothing when this was asked. O(pages)."""
        if self.hbm is None:
            return 0
        slots = self.hbm.slot_of(np.arange(self.hbm.num_pages))
        return int((states(self.tables.columns.pool(Tier.HBM).state[slots]) == SlotState.FREE).sum())


class Descriptors:
    """One connection to the descriptor socket. `open` runs on the caller's thread, later pushes on a thread of ours."""

    def __init__(
        self,
        path: str,
        token: bytes,
        *,
        slot_bytes: int,
        spec: DeviceSpec | None,
        device: Device | None,
        timeout_s: float,
        hbm_range: HbmMemory | None = None,
        listener: DramListener | None = None,
        shard: Shard = WHOLE,
        member: int | None = None,
    ) -> None:
        """`hbm_range`: pages of a session that this one takes the place of; its extents are mapped there.

        `slot_bytes` is a whole block's, `shard` says which part of it is in HBM here. `device` is what `spec` names,
        opened by the caller, who closes it after the memory. `member`: this process's number in the session; None: that
        of the shard.
        """
        self._range = hbm_range
        self._inherited = hbm_range is not None
        self._listener = listener
        self._spec = spec
        self._device = device
        self._path = path
        self._token = token
        self._member = shard.member if member is None else member
        self._offset = shard.offset(slot_bytes)
        self._slot_bytes = shard.nbytes(slot_bytes)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._arrived = threading.Condition()
        self.closed = True

    def open(self, known: MappedMemory | None = None) -> MappedMemory:
        """Connects, says hello, maps the first set, and gives the HBM extents that are missing.

        `known`: what an earlier connection of the same session mapped, which then only grows. Raises: Unavailable,
        DeadlineExceeded, FailedPrecondition (refused).
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.connect(self._path)
            pidfd = os.pidfd_open(os.getpid())
            try:
                wire.send(self._socket, wire.Hello(token=self._token, member=self._member), [pidfd])
            finally:
                os.close(pidfd)
            memory = self._first_set(known)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no answer on {self._path} within {self._timeout_s} s") from None
            if isinstance(error, OSError):
                raise Unavailable(f"cannot reach the descriptor socket {self._path}: {error}") from error
            raise
        self._socket.settimeout(None)
        self.closed = False
        self._thread = threading.Thread(
            target=self._listen, args=(memory,), name="kvstore-descriptors", daemon=True
        )
        self._thread.start()
        return memory

    def close(self) -> None:
        """Ends the connection; the store may then free what this process held once the process is gone too."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._thread is not None:
                self._thread.join(self._timeout_s)
            self._socket.close()
        self.closed = True

    def wait_mapped(self, memory: MappedMemory, hbm: U32, dram: U32, timeout_s: float) -> bool:
        """Waits until the extents of these slots are mapped: their descriptors travel on another socket."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while not memory.mapped(hbm, dram):
                left = deadline - time.monotonic()
                if left <= 0 or self.closed:
                    return False
                self._arrived.wait(left)
        return True

    def _first_set(self, known: MappedMemory | None) -> MappedMemory:
        times = PartTimes()
        with times.part("tables"):
            received = self._receive()
        if not isinstance(received.message, wire.Tables):
            received.close()
            text = received.message.text if isinstance(received.message, wire.Refused) else "no tables came"
            raise FailedPrecondition(f"the descriptor socket refused this process: {text}")
        try:
            if known is None:
                tables = SharedTables(received.fds[0], received.message.nbytes)
                memory = MappedMemory(tables, DramMemory(tables.columns, self._listener), None, times)
            else:
                memory = known
        finally:
            received.close()
        hbm: list[wire.Received] = []
        try:
            with times.part("DRAM mapping"):
                self._receive_extents(memory, hbm)
            if known is None and self._spec is not None and self._device is not None and self._spec.hbm_bytes:
                self._map_hbm(memory, hbm, self._spec, self._device)
        except BaseException:
            if known is None:
                self._unmap(memory)
            raise
        finally:
            for item in hbm:
                item.close()
        return memory

    def _unmap(self, memory: MappedMemory) -> None:
        """Lets what a failed opening has mapped go, with the exception of a range that was there before."""
        memory.dram.close()
        if self._range is not None and not self._inherited:
            self._range.close()

    def _receive_extents(self, memory: MappedMemory, hbm: list[wire.Received]) -> None:
        while True:
            received = self._receive()
            if isinstance(received.message, wire.Ready):
                return
            if isinstance(received.message, wire.Extent) and received.message.tier == Tier.HBM:
                hbm.append(received)  # their number decides how large the range is
            else:
                self._apply(memory, received)

    def _map_hbm(
        self, memory: MappedMemory, existing: list[wire.Received], spec: DeviceSpec, device: Device
    ) -> None:
        """Extents that outlived earlier workers first, then new ones up to the budget."""
        slot_bytes = self._slot_bytes
        wanted = hbm_slots(device, slot_bytes, spec.hbm_bytes)
        slots = memory.tables.columns.shape.hbm_slots
        with memory.times.part("HBM mapping"):
            if self._range is None:
                have = sum(_extent(item).nbytes for item in existing)
                tier = device.reserve(_RANGE_FACTOR * max(have, wanted * slot_bytes))
                self._range = HbmMemory(tier, slots=slots, slot_bytes=slot_bytes)
            else:
                self._range.reset(slots)
            memory.hbm = hbm = self._range
            hbm.add_all([_hbm_extent(item) for item in existing])
        if existing:
            with memory.times.part("HBM sample"):
                self._check_trust(memory, hbm, spec.index, [_extent(item) for item in existing])
        with memory.times.part("new HBM"):
            self._give_missing(memory, hbm, wanted)

    def _give_missing(self, memory: MappedMemory, hbm: HbmMemory, wanted: int) -> None:
        """New extents until there are `wanted` pages, or no more are accepted. Raises ResourceExhausted with none."""
        assert self._device is not None
        most, _ = slots_per_extent(self._device, self._slot_bytes)
        while (missing := wanted - hbm.num_pages) > 0:
            pages = hbm.num_pages
            refusal = self._give_extent(memory, hbm, min(most, missing))
            if refusal is not None and hbm.num_pages == pages:  # else another worker gave some meanwhile
                _LOG.warning("an HBM extent was refused: %s", refusal)
                break
        if not hbm.num_pages:
            raise ResourceExhausted("the daemon accepted no HBM extent: see `kvstore status`")

    def _check_trust(
        self, memory: MappedMemory, hbm: HbmMemory, device: int, extents: list[wire.Extent]
    ) -> None:
        """Has the daemon forget what earlier workers left, where a sample of it is not what DRAM has.

        Raises FailedPrecondition where it cannot, because a live session holds a slot.
        """
        ranges = [(extent.slot_base, extent.slots) for extent in extents]
        slot = first_difference(
            memory.tables.columns, hbm, memory.dram, device=device, ranges=ranges, offset=self._offset
        )
        if slot is None:
            return
        _LOG.warning("HBM slot %d of an earlier worker differs from its DRAM copy: none of it is used", slot)
        until = time.monotonic() + self._timeout_s
        for extent in extents:
            while isinstance(answer := self._ask(memory, wire.Distrust(extent=extent.extent)), wire.Refused):
                if time.monotonic() > until:
                    raise FailedPrecondition(f"HBM that is not what it was cannot be dropped: {answer.text}")
                time.sleep(_RETRY_S)  # a killed worker holds its slots until its DMA has surely ended

    def _give_extent(self, memory: MappedMemory, hbm: HbmMemory, slots: int) -> str | None:
        """Makes an extent and gives it to the store. Returns why it was refused; None: it was taken."""
        nbytes, plain = slots * self._slot_bytes, hbm.tier.sharing is Sharing.NONE
        kind = wire.NewPlainHbm if plain else wire.NewHbm
        fd = hbm.tier.new_extent(nbytes)
        try:
            message = kind(nbytes=nbytes, slots=slots, slot_bytes=self._slot_bytes)
            answer = self._ask(memory, message, fd)
        except BaseException:
            hbm.tier.discard(fd)
            raise
        if isinstance(answer, wire.Refused):
            hbm.tier.discard(fd)
            return answer.text
        hbm.add(extent=answer.extent, fd=fd, nbytes=nbytes, slot_base=answer.slot_base, slots=answer.slots)
        return None

    def _ask(self, memory: MappedMemory, message: wire.Message, *fds: int) -> wire.Accepted | wire.Refused:
        """Sends what is answered; what comes in between is applied. `fds` stay the caller's."""
        assert self._socket is not None
        wire.send(self._socket, message, fds)
        while True:
            received = self._receive()
            if isinstance(received.message, wire.Accepted | wire.Refused):
                return received.message
            self._apply(memory, received)

    def _receive(self) -> wire.Received:
        assert self._socket is not None
        received = wire.receive(self._socket)
        if received is None:
            raise Unavailable("the daemon closed the descriptor socket")
        return received

    def _apply(self, memory: MappedMemory, received: wire.Received) -> None:
        """Maps or forgets one extent. HBM that comes later was brought by another session of the device."""
        try:
            message = received.message
            if isinstance(message, wire.Extent) and message.tier == Tier.DRAM:
                memory.dram.add(message.extent, os.dup(received.fds[0]), message.nbytes)
            elif isinstance(message, wire.Extent) and memory.hbm is not None:
                _add_hbm(memory.hbm, received)
            elif isinstance(message, wire.Dropped) and message.tier == Tier.DRAM:
                memory.dram.remove(message.extent)
            elif isinstance(message, wire.Refused):
                raise FailedPrecondition(message.text)
        finally:
            received.close()
        with self._arrived:
            self._arrived.notify_all()

    def _listen(self, memory: MappedMemory) -> None:
        assert self._socket is not None
        try:
            while (received := wire.receive(self._socket)) is not None:
                self._apply(memory, received)
        except (OSError, KvstoreError) as error:
            _LOG.info("the descriptor socket ended: %s", error)
        self.closed = True
        with self._arrived:
            self._arrived.notify_all()


def _add_hbm(hbm: HbmMemory, received: wire.Received) -> None:
    """Maps an extent; one that is mapped already is left alone: a restarted daemon sends every extent again."""
    extent = _extent(received)
    if hbm.mapped(np.array([extent.slot_base], dtype=np.uint32)):
        return
    hbm.add_all([_hbm_extent(received)])


def _hbm_extent(received: wire.Received) -> HbmExtent:
    """What to map; its descriptor is the mapping's own."""
    extent = _extent(received)
    return HbmExtent(
        extent=extent.extent,
        fd=os.dup(received.fds[0]),
        nbytes=extent.nbytes,
        slot_base=extent.slot_base,
        slots=extent.slots,
    )


def _extent(received: wire.Received) -> wire.Extent:
    assert isinstance(received.message, wire.Extent)
    return received.message
