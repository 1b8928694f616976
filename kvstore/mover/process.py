"""The mover: the process that moves blocks between mapped DRAM extents and one disk.

    python -m kvstore.mover.process FD [LOCK] inherited: the socketpair's end, the directory's lock (`mover.link`)

It decides nothing. One thread reads the socket, one opens and drops slabs (`kvstore.mover.slabs`); I/O threads take
pieces from a queue (`kvstore.mover.queue`), carry them out and send the replies themselves, without a hand-over. A hung
disk, an I/O error or a checksum thus never stops the daemon. At EOF (the daemon is gone) what waits is forgotten, what
is running is finished, and the process exits: until then it holds the directory's lock and its DRAM slots count as
held. SIGINT and SIGTERM are ignored, so that a drain can finish.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvstore.config import NvmeThrottle
from kvstore.errors import KvstoreError, NotFound
from kvstore.faults import DISK_FAULTS_VARIABLE, fault
from kvstore.layout import Tier
from kvstore.mover.queue import Job, WorkQueue
from kvstore.mover.slabs import SlabThread
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from kvstore.wire.packed import REPLY
from tiers.base import Moves, Replies, StorageTier
from tiers.decorators import MeasuredStorage, ThrottledStorage
from tiers.dram import DramTier
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.faulty import FaultyDisk
from tiers.nvme.io import NvmeTier
from tiers.nvme.pieces import PIECE_BYTES
from tiers.nvme.probe import plan_io
from tiers.nvme.slab import SlabFile
from tiers.nvme.trailer import checksum

__all__ = ["Mover", "main"]

_MAX_OUTSTANDING = 8192
_COUNTS_INTERVAL_S = 1.0
_FULL_POLL_MS = 10
_HELD_REPLIES = 8
"""Pieces written whose replies may wait for each other while threads have more to do: nobody waits for one of them,
and each packet wakes the daemon, which cost a tenth of a write's time on two cores."""


class Mover:
    """The socket, the tiers and the I/O threads of one path."""

    def __init__(
        self,
        sock: socket.socket,
        config: wire.Config,
        lock_fd: int | None = None,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        """`lock_fd`: the directory's lock, ours; it is let go of when no I/O is under way any more."""
        directory = self._directory = Path(config.directory)
        self._sock = sock
        self._disk = disk
        self._lock_fd = lock_fd
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sending = threading.Lock()  # guards the next four
        self._outbox: deque[bytes] = deque()  # what the socket did not take at once
        self._held: list[Replies] = []  # of writes, not sent yet
        self._outstanding = 0
        self._ended = False
        self._sent_counts = wire.Counts(
            read_blocks=0,
            read_bytes=0,
            written_blocks=0,
            written_bytes=0,
            corrupt_blocks=0,
            failed_blocks=0,
            syncs=0,
            busy_s=0.0,
        )
        self._counts_due_s = self._look_due_s = 0.0
        self._dram = DramTier()
        plan, limits = plan_io(directory, config.threads, disk), _throttle(config)
        self._nvme = NvmeTier(
            directory,
            self._dram,
            direct=config.direct,
            disk=disk,
            clock_ms=functools.partial(_daemon_ms, config.ahead_ms),
            carry=plan.carry,
            shares=plan.shares,
            piece_bytes=PIECE_BYTES if limits else plan.piece_bytes,  # which waits as a whole
            notify=self._notice,
        )
        self._nvme.slabs_bytes = config.slabs_bytes
        storage: StorageTier = self._nvme
        if limits:
            storage = ThrottledStorage(storage, limits=limits, clock=time.monotonic, sleep=time.sleep)
        self._storage = MeasuredStorage(storage, clock=time.monotonic)
        # One thread more than may write: with one less of two, writes alone would take turns with their own checksums.
        self._queue = WorkQueue(most=plan.threads)
        self._slabs = SlabThread(self._open_or_drop, self._queue_pieces)
        self._threads = [threading.Thread(target=self._work, name=f"io-{i}") for i in range(plan.threads + 1)]
        self._send(wire.Ready(threads=plan.threads))

    def run(self) -> None:
        """Serves until the daemon's end of the socket is closed and running I/O has ended."""
        for thread in self._threads:
            thread.start()
        self._slabs.start()
        try:
            self._serve()
        finally:  # also of a fault: a thread that waits for work would keep the process
            self._queue.close()
            self._slabs.close()
            for thread in self._threads:
                thread.join()
        self._storage.close()
        if self._lock_fd is not None:
            os.close(
                self._lock_fd
            )  # first: unmapping much memory takes seconds, and the disk is free already
        fault("mover.unlocked")
        self._dram.close()
        os.close(self._wake)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._ended:
            full = self._outstanding >= _MAX_OUTSTANDING
            poller.register(
                self._sock, (0 if full else select.POLLIN) | (select.POLLOUT if self._outbox else 0)
            )
            events = dict(poller.poll(_FULL_POLL_MS if full else 1000 * _COUNTS_INTERVAL_S))
            if self._wake in events:
                os.eventfd_read(self._wake)
            state = events.get(self._sock.fileno(), 0)
            if state & select.POLLOUT:
                self._flush()
            if state & select.POLLIN and not full:
                self._receive()
            elif state & (select.POLLHUP | select.POLLERR):
                self._ended = True
            self._send_counts()
            self._look_for_deleted()

    def _receive(self) -> None:
        """Takes one packet. EOF ends the mover; a packet that cannot be understood is a fault of ours and raises."""
        try:
            packet, fd = wire.receive_packet(self._sock)
        except BlockingIOError:
            return
        except ConnectionError:
            packet, fd = b"", None
        if not packet:
            self._ended = True
            return
        self._take(wire.parse(packet), fd)

    def _take(self, message: wire.Message, fd: int | None) -> None:
        match message:
            case wire.Moves():
                self._start(message.moves)
            case wire.Sync():
                self._queue.put_sync(functools.partial(self._sync, message.id))
            case wire.Slab():
                self._slabs.put(message)
            case wire.Extent():
                assert fd is not None, "an extent comes with its descriptor"
                try:
                    self._dram.adopt(message.extent, fd, message.nbytes)
                except (KvstoreError, OSError) as error:
                    self._notice(f"DRAM extent {message.extent} cannot be mapped by the mover: {error}")
                    # Moves that name it would fail, and their blocks be given up: the next mover loses none.
                    self._ended = True
            case wire.Limit():
                self._nvme.slabs_bytes = message.slabs_bytes
            case wire.Drop() if message.tier is Tier.NVME:
                self._slabs.put(message)
            case wire.Drop():
                self._drop(message)
            case _:
                raise KvstoreError(f"unexpected message {type(message).__name__}")

    def _start(self, moves: Moves) -> None:
        with self._sending:
            self._outstanding += len(moves)
        self._queue_pieces([piece for piece in self._storage.pieces(moves) if not self._waits(piece)])

    def _waits(self, piece: Moves) -> bool:
        """Whether a piece is kept until its slab is open; a check needs none."""
        return int(piece["kind"][0]) != MoveKind.VERIFY and self._slabs.held(piece)

    def _queue_pieces(self, pieces: list[Moves]) -> None:
        """Any thread: pieces whose slab is open, or is not to be had."""
        for piece in pieces:
            kind = int(piece["kind"][0])
            if kind == MoveKind.VERIFY:
                for at in range(len(piece)):
                    self._queue.put_write(functools.partial(self._check, piece[at : at + 1]))
            elif kind == MoveKind.WRITE:
                self._queue.put_write(functools.partial(self._write, piece))
            else:
                self._queue.put_read(functools.partial(self._read, piece))

    def _drop(self, drop: wire.Drop) -> None:
        try:
            if drop.tier is Tier.DRAM:
                self._dram.drop(drop.extent)
            else:
                self._storage.drop_slab(drop.extent)
        except (KvstoreError, OSError) as error:
            self._notice(f"{drop.tier.name.lower()} extent {drop.extent} was not dropped: {error}")

    # The thread of the slabs runs these two.

    def _open_or_drop(self, message: wire.Slab | wire.Drop) -> None:
        try:
            if isinstance(message, wire.Drop):
                self._drop(message)
            else:
                self._open_slab(message)
        except Exception as error:  # noqa: BLE001 (thread boundary: its moves must come back, as failed ones)
            self._notice(f"slab of extent {message.extent}: {type(error).__name__}: {error}")

    def _open_slab(self, slab: wire.Slab) -> None:
        file = SlabFile(number=slab.number, slot_bytes=slab.slot_bytes, nbytes=slab.nbytes)
        exists = self._disk.exists(self._directory / file.name)
        fault("mover.slab")
        if slab.filled and not exists:
            self._end_without({slab.extent: slab.number})
            return
        try:
            self._storage.open_slab(slab.extent, slab.number, slab.nbytes, slab.slot_bytes)
        except KvstoreError as error:
            failed = wire.SlabFailed(
                extent=slab.extent, number=slab.number, text=error.message, exists=exists
            )
            self._send(failed)
        else:
            self._send(wire.SlabOpened(extent=slab.extent, number=slab.number, direct=self._nvme.direct))

    # The I/O threads run what follows, up to `_send`.

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Job | None:
        """Waits only after every reply has been sent."""
        job = self._queue.get_now()
        if job is None:
            self._send_held()
            job = self._queue.get()
        return job

    def _write(self, piece: Moves) -> None:
        replies = self._transfer(piece)
        self._queue.write_done()
        with self._sending:
            self._held.append(replies)
            full = len(self._held) >= _HELD_REPLIES
        if full:
            self._send_held()

    def _check(self, move: Moves) -> None:
        """The checksum of what is in DRAM now."""
        replies = _failed(move)
        begin, nbytes = int(move["dram_offset"][0]), int(move["length"][0])
        with contextlib.suppress(NotFound):  # the extent has gone, and the block with it
            payload = self._dram.view(int(move["dram_extent"][0]))[begin : begin + nbytes]
            replies["checksum"] = np.frombuffer(checksum(payload), dtype="<u8")
            replies["status"] = MoveStatus.OK
        self._queue.write_done()
        self._send_replies(replies)

    def _read(self, piece: Moves) -> None:
        replies = self._transfer(piece)
        self._queue.read_done()
        self._send_replies(replies)

    def _transfer(self, piece: Moves) -> Replies:
        fault("move.start")
        try:
            replies = self._storage.transfer(piece)
        except Exception as error:  # noqa: BLE001 (thread boundary: a reply is owed for every move, whatever happened)
            self._notice(f"moving blocks failed: {type(error).__name__}: {error}")
            replies = _failed(piece)
        fault("move.done")
        return replies

    def _send_held(self) -> None:
        with self._sending:
            held, self._held = self._held, []
        if held:
            replies = np.concatenate(held)
            for begin in range(0, len(replies), wire.MAX_BATCH_MOVES):
                self._send_replies(replies[begin : begin + wire.MAX_BATCH_MOVES])

    def _send_replies(self, replies: Replies) -> None:
        with self._sending:
            self._outstanding -= len(replies)
        self._send(wire.Replies(replies))

    def _sync(self, sync_id: int) -> None:
        fault("mover.sync")
        try:
            self._storage.sync()
            text = ""
        except OSError as error:
            text = f"fdatasync failed: {error.strerror}"
        self._send_held()
        if text and self._end_with_deleted():
            return
        self._send(wire.Synced(id=sync_id, text=text))

    def _end_with_deleted(self) -> bool:
        """Any thread: tells which slabs were deleted and ends, since only then nothing moves in them; if there are."""
        try:
            deleted = self._nvme.deleted()
        except OSError:  # a disk that does not even say that is found out by its moves
            return False
        self._end_without(deleted)
        return bool(deleted)

    def _end_without(self, deleted: Mapping[int, int]) -> None:
        """Ends, where there are any, with the word that these slabs, by extent, were deleted."""
        for extent, number in deleted.items():
            self._send(wire.SlabLost(extent=extent, number=number))
        if deleted:
            with self._sending:
                self._ended = True
            os.eventfd_write(self._wake, 1)

    def _notice(self, text: str) -> None:
        self._send(wire.Notice(text=text))

    def _send(self, message: wire.Message) -> None:
        """Sends, or leaves it to the first thread where the socket is full. Any thread."""
        packet = wire.pack(message)
        with self._sending:
            waits = bool(self._outbox)
            self._outbox.append(packet)
            if not waits:
                self._flush_locked()
            if not waits and (self._outbox or self._ended):
                os.eventfd_write(self._wake, 1)

    # The first thread again.

    def _send_counts(self) -> None:
        now = time.monotonic()
        if now < self._counts_due_s:
            return
        counts = self._storage.counts()
        message = wire.Counts(**{name: getattr(counts, name) for name in wire.Counts.__slots__})
        if message != self._sent_counts:
            self._counts_due_s = now + _COUNTS_INTERVAL_S
            self._sent_counts = message
            self._send(message)

    def _look_for_deleted(self) -> None:
        now = time.monotonic()
        if now >= self._look_due_s:
            self._look_due_s = now + _COUNTS_INTERVAL_S
            self._end_with_deleted()

    def _flush(self) -> None:
        with self._sending:
            self._flush_locked()

    def _flush_locked(self) -> None:
        while self._outbox and not self._ended:
            try:
                wire.send_packet(self._sock, self._outbox[0])
            except BlockingIOError:
                return
            except ConnectionError:
                self._ended = True
                return
            self._outbox.popleft()


def _daemon_ms(ahead_ms: int) -> int:
    """The daemon's time (`Owner.now_ms`), to which that of a trailer is compared; the clock may have been set back."""
    wall_ms, steady_ms = time.time_ns() // 1_000_000, time.monotonic_ns() // 1_000_000
    return max(wall_ms, steady_ms + ahead_ms)


def _throttle(config: wire.Config) -> NvmeThrottle:
    return NvmeThrottle(
        read_bytes_per_s=config.read_bytes_per_s,
        write_bytes_per_s=config.write_bytes_per_s,
        read_operations_per_s=config.read_operations_per_s,
        write_operations_per_s=config.write_operations_per_s,
    )


def _failed(moves: Moves) -> Replies:
    replies = np.zeros(len(moves), dtype=REPLY)
    replies["id"] = moves["id"]
    replies["status"] = MoveStatus.IO_ERROR
    return replies


def main(arguments: list[str]) -> int:
    """Runs the mover whose socket, and lock where there is one, are the descriptors named by the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each slab
    with socket.socket(fileno=int(arguments[0])) as sock:
        packet, _ = wire.receive_packet(sock)
        if not packet:
            return 0
        config = wire.parse(packet)
        if not isinstance(config, wire.Config):
            print("kvstore mover: the first message is not a configuration", file=sys.stderr)
            return 2
        os.nice(config.nice)
        sock.setblocking(False)
        lock_fd = int(arguments[1]) if len(arguments) > 1 else None
        gc.freeze()  # what was imported stays: a full collection would walk through all of it, in the middle of a move
        Mover(sock, config, lock_fd, _disk(config, os.environ)).run()
    return 0


def _disk(config: wire.Config, environ: Mapping[str, str]) -> Disk:
    """The system's, or in tests one with the faults of a file."""
    faults = environ.get(DISK_FAULTS_VARIABLE)
    return FaultyDisk(Path(config.directory), Path(faults)) if faults else SYSTEM_DISK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
