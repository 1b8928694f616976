"""Whether the processes of a session live: a member is gone when its pidfd has fired *and* its socket is at its end.

The end of the socket comes up to 150 ms before the driver has stopped a dead process's DMA, and a pidfd fires while a
forked child still has the memory mapped (both measured: FACTS), so only both together say that nothing is touched.
A stopped process (SIGSTOP) shows neither: what it holds is held for as long as it is stopped. Owner loop only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import InvalidArgument

__all__ = ["Life", "check_pidfd", "process_of", "same_process"]


class Life:
    """Watches one member. `on_end` is called once, when it is certainly gone."""

    __slots__ = ("_on_end", "closed", "exited", "pidfd")

    def __init__(self, pidfd: int, on_end: Callable[[], None]) -> None:
        self.pidfd = pidfd
        self._on_end = on_end
        self.exited = False
        self.closed = False
        asyncio.get_running_loop().add_reader(pidfd, self._exit)

    @property
    def ended(self) -> bool:
        """Whether nothing of the process can touch memory any more."""
        return self.exited and self.closed

    def _exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        self.exited = True
        if self.closed:
            self._on_end()

    def socket_closed(self) -> None:
        """The member's connection is at its end."""
        if not self.closed:
            self.closed = True
            if self.exited:
                self._on_end()

    def stop(self) -> None:
        """Ends the watching and closes the pidfd."""
        if not self.exited:
            asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)


def check_pidfd(fd: int) -> None:
    """Raises InvalidArgument unless `fd` is a pidfd."""
    if process_of(fd) is None:
        raise InvalidArgument("a HELLO must carry the pidfd of the process that sends it")


def process_of(pidfd: int) -> int | None:
    """Pid of a pidfd as this process sees it: 0 or less in another pid namespace or when gone; None: no pidfd."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return None


def same_process(one: int, other: int) -> bool:
    """Whether two pidfds are of one process, which lives. False where that cannot be told."""
    pid = process_of(one)
    if pid is None or pid < 0 or pid != process_of(other):
        return False
    if pid > 0:
        return True
    # Of another pid namespace: 0, like every process there. Linux 6.9 and later number processes by inode.
    first, second = os.fstat(one), os.fstat(other)
    return first.st_dev != _anonymous_device() and (first.st_dev, first.st_ino) == (
        second.st_dev,
        second.st_ino,
    )


def _anonymous_device() -> int:
    """Device of descriptors that share one inode: pidfds among them, before Linux 6.9."""
    fd = os.eventfd(0)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
