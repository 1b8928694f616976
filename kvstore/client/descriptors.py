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

from kvstore.client.memory import DramMemory, HbmMemory, SharedTables
from kvstore.errors import DeadlineExceeded, FailedPrecondition, KvstoreError, ResourceExhausted, Unavailable
from kvstore.layout import Tier
from kvstore.wire import descriptors as wire
from tiers.memfd import create_memfd

__all__ = ["Descriptors", "MappedMemory"]

_LOG = logging.getLogger("kvstore.client")
_HBM_EXTENT_BYTES = 64 << 20
_RANGE_FACTOR = 4
"""Address space beyond a session's own budget, for extents that other sessions of the device bring."""

U32 = NDArray[np.uint32]


class MappedMemory:
    """Everything that a session maps: tables, DRAM, and HBM where it owns some."""

    __slots__ = ("dram", "hbm", "tables")

    def __init__(self, tables: SharedTables, dram: DramMemory, hbm: HbmMemory | None) -> None:
        self.tables = tables
        self.dram = dram
        self.hbm = hbm

    def mapped(self, hbm: U32, dram: U32) -> bool:
        """Whether this process can reach all of these slots. O(n)."""
        return self.dram.mapped(dram) and (self.hbm is None or self.hbm.mapped(hbm))


class Descriptors:
    """One connection to the descriptor socket. `open` runs on the caller's thread, later pushes on a thread of ours."""

    def __init__(
        self,
        path: str,
        token: bytes,
        *,
        slot_bytes: int,
        hbm_bytes: int,
        timeout_s: float,
        hbm_range: HbmMemory | None = None,
    ) -> None:
        """`hbm_range`: pages of a session that this one takes the place of; its extents are mapped there."""
        self._range = hbm_range
        self._path = path
        self._token = token
        self._slot_bytes = slot_bytes
        self._hbm_bytes = hbm_bytes
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
                wire.send(self._socket, wire.Hello(token=self._token, member=0), [pidfd])
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
        received = self._receive()
        if not isinstance(received.message, wire.Tables):
            received.close()
            text = received.message.text if isinstance(received.message, wire.Refused) else "no tables came"
            raise FailedPrecondition(f"the descriptor socket refused this process: {text}")
        try:
            if known is None:
                tables = SharedTables(received.fds[0], received.message.nbytes)
                memory = MappedMemory(tables, DramMemory(tables.columns), None)
            else:
                memory = known
        finally:
            received.close()
        hbm: list[wire.Received] = []
        try:
            self._receive_extents(memory, hbm)
            if known is None and self._hbm_bytes:
                self._map_hbm(memory, hbm)
        finally:
            for item in hbm:
                item.close()
        return memory

    def _receive_extents(self, memory: MappedMemory, hbm: list[wire.Received]) -> None:
        while True:
            received = self._receive()
            if isinstance(received.message, wire.Ready):
                return
            if isinstance(received.message, wire.Extent) and received.message.tier == Tier.HBM:
                hbm.append(received)  # their number decides how large the range is
            else:
                self._apply(memory, received)

    def _map_hbm(self, memory: MappedMemory, existing: list[wire.Received]) -> None:
        """Extents that outlived earlier workers first, then new ones up to the budget."""
        have = sum(_extent(item).nbytes for item in existing)
        wanted = self._hbm_bytes // self._slot_bytes * self._slot_bytes
        slots = memory.tables.columns.shape.hbm_slots
        if self._range is None:
            capacity_bytes = _RANGE_FACTOR * max(have, wanted)
            self._range = HbmMemory(slots=slots, slot_bytes=self._slot_bytes, capacity_bytes=capacity_bytes)
        else:
            self._range.reset(slots)
        hbm = self._range
        for item in existing:
            _add_hbm(hbm, item)
        memory.hbm = hbm
        most = max(1, _HBM_EXTENT_BYTES // self._slot_bytes)
        while (missing := wanted // self._slot_bytes - hbm.num_pages) > 0:
            if not self._give_extent(memory, hbm, min(most, missing)):
                break
        if not hbm.num_pages:
            raise ResourceExhausted("the daemon accepted no HBM extent: see `kvstore status`")

    def _give_extent(self, memory: MappedMemory, hbm: HbmMemory, slots: int) -> bool:
        """Makes an extent and gives it to the store. False: refused, the pool is as large as it may be."""
        nbytes = slots * self._slot_bytes
        assert self._socket is not None
        fd = create_memfd("hbm", nbytes)
        try:
            message = wire.NewHbm(nbytes=nbytes, slots=slots, slot_bytes=self._slot_bytes)
            wire.send(self._socket, message, [fd])
            while True:
                received = self._receive()
                answer = received.message
                if isinstance(answer, wire.Refused):
                    _LOG.warning("an HBM extent was refused: %s", answer.text)
                    return False
                if isinstance(answer, wire.Accepted):
                    hbm.add(
                        extent=answer.extent,
                        fd=os.dup(fd),
                        nbytes=nbytes,
                        slot_base=answer.slot_base,
                        slots=answer.slots,
                    )
                    return True
                self._apply(memory, received)
        finally:
            os.close(fd)

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
    hbm.add(
        extent=extent.extent,
        fd=os.dup(received.fds[0]),
        nbytes=extent.nbytes,
        slot_base=extent.slot_base,
        slots=extent.slots,
    )


def _extent(received: wire.Received) -> wire.Extent:
    assert isinstance(received.message, wire.Extent)
    return received.message
