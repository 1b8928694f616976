"""The mover: the process that moves blocks between mapped DRAM extents and one disk.

    python -m kvstore.mover FD [LOCK]      inherited: the socketpair's end, the directory's lock (`kvstore.mover_link`)

It decides nothing. One thread reads the socket and owns the tiers; I/O threads carry out pieces and send the replies
themselves, without a hand-over. A hung disk, an I/O error or a checksum thus never stops the daemon. At EOF (the daemon
is gone) what waits is forgotten, what is running is finished, and the process exits: until then it holds the
directory's lock and its DRAM slots count as held. SIGINT and SIGTERM are ignored, so that a drain can finish.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.errors import KvstoreError
from kvstore.faults import fault
from kvstore.layout import Tier
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from kvstore.wire.packed import REPLY
from tiers.base import Moves, Replies, StorageTier
from tiers.decorators import MeasuredStorage, ThrottledStorage
from tiers.dram import DramTier
from tiers.nvme.io import NvmeTier
from tiers.nvme.probe import probe_threads

__all__ = ["Mover", "WorkQueue", "main"]

_MAX_OUTSTANDING = 8192
_COUNTS_INTERVAL_S = 1.0
_FULL_POLL_MS = 10
_READS_PER_WRITE = 7  # reads go first, and still a write gets through
_HELD_REPLIES = 8
"""Pieces written whose replies may wait for each other while threads have more to do: nobody waits for one of them,
and each packet wakes the daemon, which cost a tenth of a write's time on two cores."""

_Job = Callable[[], None]


class WorkQueue:
    """Jobs for the I/O threads: syncs, then reads, then writes, with every eighth turn a write's.

    At most `max_writes` run at once, so that a read finds a thread also while writes wait for a slow or throttled disk.
    """

    def __init__(self, *, max_writes: int) -> None:
        self._max_writes = max_writes
        self._running_writes = 0
        self._condition = threading.Condition()
        self._syncs: deque[_Job] = deque()
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._reads_in_row = 0
        self._closed = False

    def put_sync(self, job: _Job) -> None:
        """Queues a sync."""
        self._put(self._syncs, job)

    def put_read(self, job: _Job) -> None:
        """Queues a read."""
        self._put(self._reads, job)

    def put_write(self, job: _Job) -> None:
        """Queues a write."""
        self._put(self._writes, job)

    def get(self) -> _Job | None:
        """The next job; waits for one; None once the queue is closed."""
        with self._condition:
            while not self._closed:
                if (job := self._take()) is not None:
                    return job
                self._condition.wait()
            return None

    def get_now(self) -> _Job | None:
        """The next job; None where there is none now."""
        with self._condition:
            return None if self._closed else self._take()

    def _take(self) -> _Job | None:
        job = self._next()
        if job is not None and (self._syncs or self._reads or self._may_write()):
            self._condition.notify()  # who takes one wakes who can take the next, and nobody else
        return job

    def _next(self) -> _Job | None:
        if self._syncs:
            return self._syncs.popleft()
        if self._reads and not (self._may_write() and self._reads_in_row >= _READS_PER_WRITE):
            self._reads_in_row += 1
            return self._reads.popleft()
        if self._may_write():
            self._reads_in_row = 0
            self._running_writes += 1
            return self._writes.popleft()
        return None

    def _may_write(self) -> bool:
        return bool(self._writes) and self._running_writes < self._max_writes

    def write_done(self) -> None:
        """A write that `get` gave has ended; the caller comes for its next job at once."""
        with self._condition:
            self._running_writes -= 1

    def close(self) -> None:
        """Forgets what waits; `get` gives None from now on."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _put(self, queue: deque[_Job], job: _Job) -> None:
        with self._condition:
            queue.append(job)
            self._condition.notify()


class Mover:
    """The socket, the tiers and the I/O threads of one path."""

    def __init__(self, sock: socket.socket, config: wire.Config, lock_fd: int | None = None) -> None:
        """`lock_fd`: the directory's lock, ours; it is let go of when no I/O is under way any more."""
        directory = Path(config.directory)
        self._sock = sock
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
        self._counts_due_s = 0.0
        self._dram = DramTier()
        self._nvme = NvmeTier(directory, self._dram, direct=config.direct, notify=self._notice)
        storage: StorageTier = self._nvme
        if config.write_bytes_per_s:
            storage = ThrottledStorage(
                storage,
                write_bytes_per_s=config.write_bytes_per_s,
                clock=time.monotonic,
                sleep=time.sleep,
            )
        self._storage = MeasuredStorage(storage, clock=time.monotonic)
        count = config.threads or probe_threads(directory)
        # One thread more than may write: with one less of two, writes alone would take turns with their own checksums.
        self._queue = WorkQueue(max_writes=count)
        self._threads = [threading.Thread(target=self._work, name=f"io-{i}") for i in range(count + 1)]
        self._send(wire.Ready(threads=count))

    def run(self) -> None:
        """Serves until the daemon's end of the socket is closed and running I/O has ended."""
        for thread in self._threads:
            thread.start()
        try:
            self._serve()
        finally:  # also of a fault: a thread that waits for work would keep the process
            self._queue.close()
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
                self._open_slab(message)
            case wire.Extent():
                assert fd is not None, "an extent comes with its descriptor"
                try:
                    self._dram.adopt(message.extent, fd, message.nbytes)
                except (KvstoreError, OSError) as error:
                    self._notice(f"DRAM extent {message.extent} cannot be mapped by the mover: {error}")
                    # Moves that name it would fail, and their blocks be given up: the next mover loses none.
                    self._ended = True
            case wire.Drop():
                self._drop(message)
            case _:
                raise KvstoreError(f"unexpected message {type(message).__name__}")

    def _start(self, moves: Moves) -> None:
        with self._sending:
            self._outstanding += len(moves)
        for piece in self._storage.pieces(moves):
            if int(piece["kind"][0]) == MoveKind.WRITE:
                self._queue.put_write(functools.partial(self._write, piece))
            else:
                self._queue.put_read(functools.partial(self._read, piece))

    def _open_slab(self, slab: wire.Slab) -> None:
        try:
            self._storage.open_slab(slab.extent, slab.number, slab.nbytes, slab.slot_bytes)
        except KvstoreError as error:
            self._send(wire.SlabFailed(extent=slab.extent, text=error.message))
        else:
            self._send(wire.SlabOpened(extent=slab.extent, direct=self._nvme.direct))

    def _drop(self, drop: wire.Drop) -> None:
        try:
            if drop.tier is Tier.DRAM:
                self._dram.drop(drop.extent)
            else:
                self._storage.drop_slab(drop.extent)
        except (KvstoreError, OSError) as error:
            self._notice(f"{drop.tier.name.lower()} extent {drop.extent} was not dropped: {error}")

    # The I/O threads run what follows, up to `_send`.

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> _Job | None:
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

    def _read(self, piece: Moves) -> None:
        self._send_replies(self._transfer(piece))

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
        self._send(wire.Synced(id=sync_id, text=text))

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
        Mover(sock, config, int(arguments[1]) if len(arguments) > 1 else None).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
