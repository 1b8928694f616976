"""The mover's queue: which piece an I/O thread takes next. Any thread; what it holds is bounded by who fills it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Job", "WorkQueue"]

_READS_PER_WRITE = 7  # reads go first, and still a write gets through

Job = Callable[[], None]


class WorkQueue:
    """Jobs for the I/O threads: syncs, then reads, then writes, with every eighth turn a write's.

    At most `most` reads and as many writes run at once, by one thread more than that: a read finds a thread also while
    writes wait for a slow or throttled disk, and so does a write beside reads.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._running_reads = 0
        self._running_writes = 0
        self._condition = threading.Condition()
        self._syncs: deque[Job] = deque()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._reads_in_row = 0
        self._closed = False

    def put_sync(self, job: Job) -> None:
        """Queues a sync."""
        self._put(self._syncs, job)

    def put_read(self, job: Job) -> None:
        """Queues a read."""
        self._put(self._reads, job)

    def put_write(self, job: Job) -> None:
        """Queues a write."""
        self._put(self._writes, job)

    def get(self) -> Job | None:
        """The next job; waits for one; None once the queue is closed."""
        with self._condition:
            while not self._closed:
                if (job := self._take()) is not None:
                    return job
                self._condition.wait()
            return None

    def get_now(self) -> Job | None:
        """The next job; None where there is none now."""
        with self._condition:
            return None if self._closed else self._take()

    def _take(self) -> Job | None:
        job = self._next()
        if job is not None and (self._syncs or self._may_read() or self._may_write()):
            self._condition.notify()  # who takes one wakes who can take the next, and nobody else
        return job

    def _next(self) -> Job | None:
        if self._syncs:
            return self._syncs.popleft()
        if self._may_read() and not (self._may_write() and self._reads_in_row >= _READS_PER_WRITE):
            self._reads_in_row += 1
            self._running_reads += 1
            return self._reads.popleft()
        if self._may_write():
            self._reads_in_row = 0
            self._running_writes += 1
            return self._writes.popleft()
        return None

    def _may_read(self) -> bool:
        return bool(self._reads) and self._running_reads < self._most

    def _may_write(self) -> bool:
        return bool(self._writes) and self._running_writes < self._most

    def read_done(self) -> None:
        """A read that `get` gave has ended; the caller comes for its next job at once."""
        with self._condition:
            self._running_reads -= 1

    def write_done(self) -> None:
        """A write that `get` gave has ended; the caller comes for its next job at once."""
        with self._condition:
            self._running_writes -= 1

    def close(self) -> None:
        """Forgets what waits; `get` gives None from now on."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _put(self, queue: deque[Job], job: Job) -> None:
        with self._condition:
            queue.append(job)
            self._condition.notify()
