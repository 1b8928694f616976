"""The daemon's end of a mover: starts it, sends it work, takes its answers.

Made for one event loop, without a thread: `fileno()` is readable when `receive` has something, `wants_write` says when
`flush` should be called on writability, `pidfd` becomes readable when the process has ended. Nothing blocks but
`start` (milliseconds: fork and exec) and `reap` with a time-out. What is under way is bounded by `room`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument, KvstoreError, ResourceExhausted
from kvstore.layout import Tier
from kvstore.wire import mover as wire

__all__ = ["MoverLink"]

_MAX_QUEUED = 4096  # control messages that wait for the socket: each extent and slab is one
_MAX_PACKETS_A_CALL = 64  # of `receive`, so that one mover cannot keep the loop
_START_S = 10.0  # of a mover on a busy machine, at most: so long nothing is said of its disk
_STARVED = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
_SUPERVISION = ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "NOTIFY_SOCKET")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    packet: bytes
    fd: int | None  # ours, closed when sent


class MoverLink:
    """One mover process. Owned by one loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, pidfd: int, *, max_outstanding: int
    ) -> None:
        self._process = process
        self._sock = sock
        self._max_outstanding = max_outstanding
        self._queued: deque[_Queued] = deque()
        self._progress_s = time.monotonic()
        self._asked_from_s = (
            self._progress_s + _START_S
        )  # from then on the disk, no process that starts, keeps us
        self._starved = False
        self.pidfd = pidfd
        """Readable when the process has ended; the link's until `close`."""
        self.outstanding = 0
        """Moves sent and not answered."""
        self.syncs = 0
        """Syncs sent and not answered."""
        self.ended = False
        """The mover's end of the socket is closed: it is dying. Its memory is in use until `pidfd` is readable."""

    @classmethod
    def start(
        cls, config: wire.Config, *, lock_fd: int | None = None, max_outstanding: int = 1024
    ) -> MoverLink:
        """Starts a mover; it inherits `lock_fd`, so the directory stays locked until it has ended.

        Raises KvstoreError where the process cannot be started.
        """
        ours, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        theirs.setblocking(True)  # until it has its configuration
        inherited = [theirs.fileno(), *([] if lock_fd is None else [lock_fd])]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.mover.process", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ),
                start_new_session=True,  # a Ctrl-C at the terminal is the daemon's
            )
        except OSError as error:
            ours.close()
            raise KvstoreError(f"cannot start a mover: {error.strerror}") from error
        finally:
            theirs.close()
        link = cls(process, ours, os.pidfd_open(process.pid), max_outstanding=max_outstanding)
        link._send(config)
        return link

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def room(self) -> int:
        """Moves that may be sent now; 0 while messages wait for the socket."""
        return 0 if self._queued or self.ended else max(0, self._max_outstanding - self.outstanding)

    @property
    def starved(self) -> bool:
        """A message waits that the kernel does not take now, however writable the socket is: `flush` again later."""
        return self._starved and not self.ended

    @property
    def wants_write(self) -> bool:
        """Messages wait for the socket: call `flush` when it is writable."""
        return bool(self._queued) and not self.ended

    def fileno(self) -> int:
        """The socket, for the loop."""
        return self._sock.fileno()

    def send_extent(self, extent: int, nbytes: int, fd: int) -> None:
        """Gives it a DRAM extent; `fd` stays the caller's. Raises ResourceExhausted where too much is queued."""
        self._send(wire.Extent(extent=extent, nbytes=nbytes), fd)

    def send_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int, blocks: int = 0) -> None:
        """Asks for a slab with so many blocks in it; answered by SlabOpened, SlabFailed or SlabLost.

        Moves may follow at once. Raises ResourceExhausted.
        """
        slab = wire.Slab(
            extent=extent, number=number, nbytes=nbytes, slot_bytes=slot_bytes, filled=blocks > 0
        )
        self._send(slab)

    def send_drop(self, tier: Tier, extent: int) -> None:
        """Unmaps a DRAM extent or deletes a slab, when no move that names it is out. Raises ResourceExhausted."""
        self._send(wire.Drop(tier=tier, extent=extent))

    def send_limit(self, slabs_bytes: int) -> None:
        """Says how much slabs may take from now on. Raises ResourceExhausted."""
        self._send(wire.Limit(slabs_bytes=slabs_bytes))

    def send_sync(self, sync_id: int) -> None:
        """Asks for fdatasync of every write answered so far; answered by Synced. Raises ResourceExhausted."""
        self._began()
        self._send(wire.Sync(id=sync_id))
        self.syncs += 1

    def send_moves(self, moves: NDArray[np.void]) -> int:
        """Sends the first of `moves` (MOVE[]) that there is room for; how many: the rest is for later."""
        sent = 0
        limit = min(len(moves), self.room)
        while sent < limit:
            batch = moves[sent : min(sent + wire.MAX_BATCH_MOVES, limit)]
            try:
                wire.send_packet(self._sock, wire.pack(wire.Moves(batch)))
            except BlockingIOError:
                break
            except ConnectionError:
                self.ended = True
                break
            except OSError as error:
                self._starved = error.errno in _STARVED
                if not self._starved:
                    raise
                break
            self._began()
            self.outstanding += len(batch)
            sent += len(batch)
        return sent

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        self._starved = False
        while self._queued and not self.ended:
            first = self._queued[0]
            try:
                wire.send_packet(self._sock, first.packet, first.fd)
            except BlockingIOError:
                return
            except ConnectionError:
                self.ended = True
                return
            except OSError as error:
                if error.errno not in _STARVED:
                    raise
                self._starved = True  # as a rule it has more descriptors of ours to read than a user may send
                return
            self._queued.popleft()
            if first.fd is not None:
                os.close(first.fd)

    def receive(self) -> list[wire.Message]:
        """What the mover said, at most 64 packets a call; `ended` becomes true at EOF or nonsense.

        Replies come as one message, the first, whatever the number of packets: a mover answers each piece by itself.
        """
        messages: list[wire.Message] = []
        replies: list[NDArray[np.void]] = []
        for _ in range(_MAX_PACKETS_A_CALL):
            if self.ended:
                break
            try:
                packet, _ = wire.receive_packet(self._sock)
                if not packet:
                    self.ended = True
                    break
                message = wire.parse(packet)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # it ended with packets of ours unread: what it said before that comes now, then EOF
            except (ConnectionError, InvalidArgument):
                self.ended = True
                break
            if isinstance(message, wire.Replies):
                self.outstanding -= len(message.replies)
                replies.append(message.replies)
            else:
                messages.append(message)
            if isinstance(message, wire.Replies | wire.Synced):
                self._progress_s = time.monotonic()
            if isinstance(message, wire.Ready):
                self._asked_from_s = time.monotonic()
            if isinstance(message, wire.Synced):
                self.syncs -= 1
        if replies:
            messages.insert(0, wire.Replies(np.concatenate(replies)))
        return messages

    def stalled_s(self) -> float:
        """Seconds since anything was answered while something is out; 0 where nothing is. A hung disk shows here.

        The first ten seconds of a mover that has not yet said that it is ready do not count: it has only begun to ask
        its disk, and on a busy machine a process takes long to start.
        """
        if not (self.outstanding or self.syncs):
            return 0.0
        return max(0.0, time.monotonic() - max(self._progress_s, self._asked_from_s))

    def not_watched(self, away_s: float) -> None:
        """So long this process did not run, and perhaps the mover neither: no disk kept anybody waiting meanwhile."""
        now_s, since_s = time.monotonic(), max(self._progress_s, self._asked_from_s)
        if since_s < now_s:
            self._progress_s = min(now_s, since_s + away_s)

    def kill(self) -> None:
        """SIGKILL. A process that is stuck in the disk dies when the disk lets go; `pidfd` says when."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def stop(self) -> None:
        """Closes the socket: the mover forgets what waits, finishes what runs and exits."""
        self.ended = True
        self._sock.close()
        for queued in self._queued:
            if queued.fd is not None:
                os.close(queued.fd)
        self._queued.clear()

    def reap(self, timeout_s: float = 0.0) -> int | None:
        """Exit code (negative: the signal) once it has ended, and then closes all of it; None while it lives."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self.stop()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return code

    def _began(self) -> None:
        """Work goes out: where none was, the time of the last answer says nothing."""
        if not (self.outstanding or self.syncs):
            self._progress_s = time.monotonic()

    def _send(self, message: wire.Message, fd: int | None = None) -> None:
        if len(self._queued) >= _MAX_QUEUED:
            raise ResourceExhausted("the mover takes no messages: its disk hangs", retry_after_s=1.0)
        if self.ended:
            return
        self._queued.append(_Queued(packet=wire.pack(message), fd=None if fd is None else os.dup(fd)))
        self.flush()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours without what only the daemon may answer to; numpy needs no threads there."""
    kept = {name: value for name, value in environ.items() if name not in _SUPERVISION}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
