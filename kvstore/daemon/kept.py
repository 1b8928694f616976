"""What outlives the daemon: the registry of descriptors that the keeper holds, and the keeper's own life.

A name is registered before anything relies on it: `await add(…)` returns when the keeper holds the descriptor. When
the keeper dies, its pidfd tells; another is started that adopts this process, and everything is stored again.
Owner loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

from kvstore.daemon.log import Log
from kvstore.daemon.notify import Notifier
from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.keeper import MAX_DESCRIPTORS, bind_notify_socket

__all__ = ["Kept"]

_LOG = Log("kept")
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 5.0
_SPARE = 128


class Kept:
    """Descriptors by name. They belong to their users; here is only what the keeper was given."""

    def __init__(
        self, notifier: Notifier, keeper_pid: int | None, blackbox: str, on_restart: Callable[[], None]
    ) -> None:
        """`blackbox`: where a keeper leaves the flight recording."""
        self._notifier = notifier
        self._blackbox = blackbox
        self._fds: dict[str, int] = {}
        self._keeper_pid = keeper_pid
        self._keeper: subprocess.Popen[bytes] | None = None
        self._on_restart = on_restart
        # The keeper has the same limit as we and some descriptors of its own; beyond it, it would lose what it is sent.
        self._most = min(MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _SPARE)

    @property
    def keeper_pid(self) -> int:
        """The process that holds the descriptors; 0 where it is systemd, or nobody."""
        return self._keeper_pid or 0

    @property
    def survives(self) -> bool:
        """Whether anything is kept at all."""
        return self._notifier.active

    async def add(self, fds: Mapping[str, int]) -> None:
        """Registers descriptors; returns once the keeper holds them.

        Raises ResourceExhausted beyond what the keeper holds, Unavailable when it does not confirm.
        """
        if len(self._fds) + len(fds) > self._most:
            raise ResourceExhausted(f"the keeper holds at most {self._most} descriptors: raise `ulimit -n`")
        before = {name: self._fds[name] for name in fds if name in self._fds}
        self._fds.update(fds)
        try:
            await self._notifier.store_all(fds)
        except BaseException:
            self.remove(fds)
            self._fds.update(before)  # the next keeper is given them again
            raise

    def assume(self, fds: Mapping[str, int]) -> None:
        """Registers descriptors that the keeper gave us: it holds them already."""
        self._fds.update(fds)

    def remove(self, names: Iterable[str]) -> None:
        """The keeper lets go of these, if it has them."""
        known = [name for name in names if self._fds.pop(name, None) is not None]
        self._notifier.remove(known)

    async def watch_keeper(self) -> None:
        """Runs for ever: when the keeper dies, starts another and stores everything again."""
        delay_s = _FIRST_DELAY_S
        while self._keeper_pid is not None:
            await _ended(self._keeper_pid)
            _LOG.warning("keeper died", pid=self._keeper_pid)
            if self._keeper is not None:
                self._keeper.poll()  # reaps it
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
            try:
                await self._start_another()
            except (OSError, KvstoreError) as error:
                _LOG.warning("no new keeper", error=error)
                continue
            delay_s = _FIRST_DELAY_S

    async def _start_another(self) -> None:
        with bind_notify_socket() as notify:
            command = [
                *[sys.executable, "-m", "kvstore.keeper", "--blackbox", self._blackbox],
                *["--adopt", str(os.getpid())],
                *["--notify-fd", str(notify.fileno()), "--", *_own_command()],
            ]
            self._keeper = subprocess.Popen(command, pass_fds=[notify.fileno()], start_new_session=True)  # noqa: ASYNC220 (1 ms, rare)
            self._notifier.connect(notify.getsockname())
        self._keeper_pid = self._keeper.pid
        await self._notifier.store_all(self._fds)
        self._on_restart()
        _LOG.info("keeper started", pid=self._keeper_pid, descriptors=len(self._fds))


def _own_command() -> list[str]:
    """How this process was started, so that a keeper can do it again."""
    return [sys.executable, *sys.orig_argv[1:]]


async def _ended(pid: int) -> None:
    """Returns when the process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    fired = asyncio.Event()
    loop.add_reader(pidfd, fired.set)
    try:
        # The pid may have been another process's by the time it was opened, if the keeper died just before.
        with contextlib.suppress(ProcessLookupError):
            await fired.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
