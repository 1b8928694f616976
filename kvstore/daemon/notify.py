"""The daemon's side of the descriptor store: sd_notify(3) and sd_listen_fds(3), towards the keeper or systemd alike.

`store` returns when the manager holds the descriptor: only then may anything rely on it. Calls come from the owner loop
only. Without $NOTIFY_SOCKET nothing outlives the daemon: calls do nothing and `active` says so.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import Unavailable

__all__ = ["Notifier", "inherited_descriptors"]

_FIRST_FD = 3
_BARRIER_TIMEOUT_S = 10.0
_MAX_QUEUED = 16_384
_RETRY_S = 0.002
_STARVED = (
    errno.ETOOMANYREFS,
    errno.ENOBUFS,
    errno.ENOMEM,
)  # a descriptor sent now would be lost without a word


@dataclass(frozen=True, slots=True)
class _Datagram:
    lines: str
    fds: tuple[int, ...]  # ours: duplicates, closed once sent


class Notifier:
    """Sends states and descriptors to the manager, in order, without blocking the loop."""

    def __init__(self, address: str | None) -> None:
        self._queue: deque[_Datagram] = deque()
        self._socket: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        if address:
            self.connect("\0" + address[1:] if address.startswith("@") else address)

    @property
    def active(self) -> bool:
        """Whether there is a manager: without one nothing outlives the daemon."""
        return self._socket is not None

    def connect(self, address: str) -> None:
        """Talks to the manager at `address` from now on."""
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.connect(address)

    def tell(self, state: str) -> None:
        """Sends a state such as `READY=1`."""
        self._send(state)

    async def store(self, name: str, fd: int) -> None:
        """Gives `fd` to the manager under `name`; returns once it is held.

        Raises Unavailable when the manager does not confirm it in time.
        """
        await self.store_all({name: fd})

    async def store_all(self, fds: Mapping[str, int]) -> None:
        """As `store`, for many descriptors with one confirmation."""
        if not self.active or not fds:
            return
        for name, fd in fds.items():
            self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))
        await self.barrier()

    def remove(self, names: Sequence[str]) -> None:
        """The manager closes what it holds under `names`. Nobody relies on that, so nothing waits."""
        for name in names:
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    async def barrier(self) -> None:
        """Returns when everything sent so far has been handled."""
        if not self.active:
            return
        loop = asyncio.get_running_loop()
        read, write = os.pipe()
        done = loop.create_future()
        try:
            try:
                self._send("BARRIER=1", (write,))
            finally:
                os.close(write)
            loop.add_reader(read, _settle, done)
            await asyncio.wait_for(done, _BARRIER_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the keeper did not confirm within {_BARRIER_TIMEOUT_S:g} s") from None
        finally:
            loop.remove_reader(read)
            os.close(read)

    def _send(self, lines: str, fds: tuple[int, ...] = ()) -> None:
        if not self.active:
            return
        if len(self._queue) >= _MAX_QUEUED:
            raise Unavailable("the keeper does not take what is sent to it")
        self._queue.append(_Datagram(lines, tuple(os.dup(fd) for fd in fds)))
        self._flush()

    def _flush(self) -> None:
        """Sends what is queued while the manager's queue takes it; the rest a little later."""
        assert self._socket is not None
        while self._queue:
            datagram = self._queue[0]
            rights = array.array("i", datagram.fds).tobytes()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if datagram.fds else []
            try:
                self._socket.sendmsg([datagram.lines.encode()], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                # A unix datagram socket polls writable although its peer's queue is full: ask again by the clock.
                self._try_again_later()
                return
            except OSError as error:
                if error.errno in _STARVED:
                    self._try_again_later()
                    return
                # The manager has died; whoever watches it starts another and stores everything again.
            self._queue.popleft()
            for fd in datagram.fds:
                os.close(fd)

    def _try_again_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def close(self) -> None:
        """Drops what is queued and closes the socket."""
        if self._retry is not None:
            self._retry.cancel()
        while self._queue:
            for fd in self._queue.popleft().fds:
                os.close(fd)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def inherited_descriptors(environ: Mapping[str, str], pid: int) -> dict[str, int]:
    """Descriptors by name that the manager kept from an earlier life; close-on-exec from now on.

    Empty where there are none, or where they were meant for another process.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return {}
    count = int(environ.get("LISTEN_FDS", "0"))
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    fds = dict(zip(names, range(_FIRST_FD, _FIRST_FD + count), strict=False))
    for fd in fds.values():
        os.set_inheritable(fd, False)
    return fds
