"""An event loop without time, sockets or threads: what is next is the simulation's choice.

It runs the daemon's own coroutines. Callbacks keep asyncio's order; everything that comes from outside (a thread's end,
a readable descriptor, a timer) comes when `run_job`, `poll` and `advance` say so. A loop whose process has died is left
as it is: nothing of it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any


class SimLoop(asyncio.AbstractEventLoop):
    """See the module. `clock()` is the machine's time in seconds."""

    def __init__(self, clock: Callable[[], float], readable: Callable[[int], bool]) -> None:
        self._clock = clock
        self._readable = readable
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._jobs: list[tuple[Callable[[], object], asyncio.Future[Any]]] = []
        self._readers: dict[int, asyncio.Handle] = {}
        self._writers: dict[int, asyncio.Handle] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.dead = False

    # ------------------------------------------------------------ the simulation's side

    @property
    def ready(self) -> bool:
        """Whether a callback waits."""
        return bool(self._ready)

    @property
    def jobs(self) -> int:
        """Calls that are in threads."""
        return len(self._jobs)

    def run_one(self) -> None:
        """The next callback."""
        handle = self._ready.popleft()
        if not handle.cancelled():
            handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]

    def run_job(self, number: int) -> None:
        """One of the threads does its work and hands back what came of it."""
        call, future = self._jobs.pop(number)
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 (as a thread pool does)
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    def readable(self) -> bool:
        """Whether `poll` has anything to do."""
        return bool(self._writers) or any(self._readable(fd) for fd in self._readers)

    def poll(self) -> None:
        """Calls back for each descriptor that is readable or wanted to be written."""
        found = [handle for fd, handle in self._readers.items() if self._readable(fd)]
        self._ready.extend(
            handle for handle in (*found, *self._writers.values()) if handle not in self._ready
        )

    def next_timer_s(self) -> float | None:
        """When the next timer is due."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def fire(self) -> None:
        """Timers that are due become callbacks."""
        while (due := self.next_timer_s()) is not None and due <= self._clock():
            self._ready.append(heapq.heappop(self._timers)[2])

    def die(self) -> None:
        """The process is gone."""
        self.dead = True
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._ready.clear()
        self._jobs.clear()
        self._readers.clear()
        self._writers.clear()

    def close_tasks(self) -> None:
        """Lets go of what was under way, once nothing of it can matter any more."""
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
        finally:
            asyncio._set_running_loop(None)
        self.tasks.clear()

    # ------------------------------------------------------------ asyncio's side

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.dead

    def time(self) -> float:
        return self._clock()

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        if len(self.tasks) > 64:
            self.tasks = [task for task in self.tasks if not task.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        self._jobs.append((lambda: func(*args), future))
        return future

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self.remove_reader(fd)
        self._readers[fd] = asyncio.Handle(callback, args, self)

    def remove_reader(self, fd: int) -> bool:
        return _removed(self._readers, fd)

    def add_writer(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self.remove_writer(fd)
        self._writers[fd] = asyncio.Handle(callback, args, self)

    def remove_writer(self, fd: int) -> bool:
        return _removed(self._writers, fd)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # of a process that has died; of a living one its tasks are looked at


def _removed(handles: dict[int, asyncio.Handle], fd: int) -> bool:
    """Takes a descriptor out; what was about to be called back for it is not."""
    handle = handles.pop(fd, None)
    if handle is not None:
        handle.cancel()
    return handle is not None
