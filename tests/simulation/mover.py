"""A mover that is no process: the real one over a disk that is simulated, its socket two queues, its threads moments.

The scheduler of the machine chooses among `choices` what happens in it next. `Link` is the daemon's end of it.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import NotFound
from kvstore.mover.link import MoverLink
from kvstore.mover.process import Mover
from kvstore.wire import mover as wire

if TYPE_CHECKING:
    from tests.simulation.machine import Machine

__all__ = ["Link", "SimMover"]

_THREADS = 2


class _Shared:
    """The DRAM extents that a mover has been given."""

    def __init__(self, memories: Sequence[bytearray]) -> None:
        """By descriptor."""
        self._memories = memories
        self._mapped: dict[int, memoryview] = {}

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        self._mapped[extent] = memoryview(self._memories[fd])

    def view(self, extent: int) -> memoryview:
        if extent not in self._mapped:
            raise NotFound(f"extent {extent} is not mapped")
        return self._mapped[extent]

    def drop(self, extent: int) -> None:
        del self._mapped[extent]

    def close(self) -> None:
        self._mapped.clear()


_A_FAULT = re.compile(r": \w+(Error|Exception): ")
"""In a notice: an exception that nobody expected, caught where a thread begins."""


class SimMover(Mover):
    """The process of a path: the real one, with its socket two queues and its threads moments in `choices`."""

    def __init__(self, machine: Machine, folder: str, slabs_bytes: int) -> None:
        self.machine = machine
        self.folder = folder
        self.inbox: deque[tuple[wire.Message, int | None]] = deque()
        """Each with the descriptor that came with it."""
        self.outbox: deque[wire.Message] = deque()
        self.running: list[tuple[float, Callable[[], None]]] = []
        """What its threads are at, and when the disk lets it end."""
        self.opening: wire.Slab | wire.Drop | None = None
        self.eof = False
        self.exited = False
        super().__init__(
            None,  # type: ignore[arg-type]
            wire.Config(directory=folder, threads=_THREADS, slabs_bytes=slabs_bytes),
            disk=machine.disk,
        )
        os.close(self._wake)
        self._wake = machine.wake_fd
        self._dram = self._nvme._memory = _Shared(machine.memories)  # type: ignore[assignment]
        self._nvme._clock_ms = machine.now_ms

    def _send(self, message: wire.Message) -> None:
        if isinstance(message, wire.Notice) and _A_FAULT.search(message.text):
            self.machine.faults.append(message.text)
        self.outbox.append(message)

    def choices(self) -> list[Callable[[], None]]:
        """What may happen in it next."""
        if self.exited:
            return []
        if self._ended and not self.eof:
            return [self.end_of_file]  # by itself: a slab that it has open was deleted
        found: list[Callable[[], None]] = []
        queue, slabs = self._queue, self._slabs
        if self.eof:
            if not self.running and self.opening is None:
                return [self.exit]
        else:
            if self.inbox:
                found.append(self._receive_one)
            if (queue._syncs or queue._may_read() or queue._may_write()) and len(self.running) <= _THREADS:
                found.append(self._start_one)
            if self.opening is None and slabs._asked:
                found.append(self._open_one)
            if self.machine.now_s >= self._look_due_s:
                found.append(self._look_for_deleted)
            if self._held and not self.running:
                found.append(self._send_held)
        if self.machine.now_s >= self.machine.hung_until_s:
            found += [
                functools.partial(self._finish, number)
                for number, (ends_s, _) in enumerate(self.running)
                if ends_s <= self.machine.now_s
            ]
            if self.opening is not None:
                found.append(self._opened)
        return found

    def end_of_file(self) -> None:
        """The daemon's end of the socket is closed: what waits is forgotten, what runs is finished."""
        self.eof = True
        self.inbox.clear()
        self._queue.close()

    def exit(self) -> None:
        """It ends by itself."""
        self._storage.close()
        self.exited = True

    def kill(self) -> None:
        """SIGKILL: some of what it was writing is written in part."""
        self.eof = self.exited = True
        disk = self.machine.disk
        quiet, disk.before = disk.before, lambda operation: None
        for _, job in self.running:
            if self.machine.rng.random() < 0.5:
                disk.torn_write = self.machine.rng.randrange(8)
                job()
        disk.before, disk.torn_write = quiet, None
        self.running.clear()
        self.outbox.clear()

    def _receive_one(self) -> None:
        self._take(*self.inbox.popleft())

    def _start_one(self) -> None:
        """A thread takes a job."""
        job = self._queue.get_now()
        if job is not None:
            self.running.append((self.machine.now_s + self.machine.latency_s(), job))
            if self.machine.rng.random() < self.machine.shape.hang:
                self.machine.hung_until_s = self.machine.now_s + self.machine.rng.uniform(0, 20)

    def _finish(self, number: int) -> None:
        self.running.pop(number)[1]()

    def _open_one(self) -> None:
        """The thread of the slabs takes what it was asked for."""
        self.opening = self._slabs._asked.popleft()

    def _opened(self) -> None:
        message, self.opening = self.opening, None
        assert message is not None
        self._open_or_drop(message)
        self._queue_pieces(self._slabs._done(message.extent))


class Link(MoverLink):
    """The daemon's end: the real one but for the socket and the process."""

    def __init__(self, mover: SimMover) -> None:
        self.mover = mover
        self.pidfd = os.dup(mover.machine.null_fd)
        self.outstanding = self.syncs = 0
        self.ended = False
        self._queued = deque()
        self._max_outstanding = 64
        self._starved = False
        self._progressed_s = mover.machine.now_s
        self._number = mover.machine.next_number()

    @property
    def pid(self) -> int:
        return self._number

    def fileno(self) -> int:
        return self._number

    @property
    def readable(self) -> bool:
        """Whether `receive` has something."""
        return not self.ended and bool(self.mover.outbox or self.mover.exited)

    def send_moves(self, moves: np.ndarray) -> int:
        count = min(len(moves), self.room)
        if count and self.mover.machine.rng.random() < 0.2:
            count = self.mover.machine.rng.randrange(count + 1)  # the socket took no more
        if count:
            self._began()
            self.outstanding += count
            self.mover.inbox.append((wire.Moves(moves[:count].copy()), None))
        return count

    def flush(self) -> None:
        pass

    def receive(self) -> list[wire.Message]:
        messages: list[wire.Message] = []
        replies: list[np.ndarray] = []
        for _ in range(self.mover.machine.rng.randrange(1, 8)):
            if not self.mover.outbox:
                self.ended = self.ended or self.mover.exited
                break
            message = self.mover.outbox.popleft()
            if isinstance(message, wire.Replies):
                self.outstanding -= len(message.replies)
                replies.append(message.replies)
            else:
                messages.append(message)
            if isinstance(message, wire.Synced):
                self.syncs -= 1
            self._progressed_s = self.mover.machine.now_s
        if replies:
            messages.insert(0, wire.Replies(np.concatenate(replies)))
        return messages

    def stalled_s(self) -> float:
        return self.mover.machine.now_s - self._progressed_s if self.outstanding or self.syncs else 0.0

    def not_watched(self, away_s: float) -> None:
        """The simulated machine never stands still; how late the real one is must not decide anything here."""

    def kill(self) -> None:
        self.mover.kill()

    def stop(self) -> None:
        self.ended = True
        if not self.mover.eof:
            self.mover.end_of_file()

    def reap(self, timeout_s: float = 0.0) -> int | None:
        if not self.mover.exited:
            return None
        self.stop()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return 0

    def _began(self) -> None:
        if not (self.outstanding or self.syncs):
            self._progressed_s = self.mover.machine.now_s

    def _send(self, message: wire.Message, fd: int | None = None) -> None:
        if not self.ended:
            self.mover.inbox.append((message, fd))
