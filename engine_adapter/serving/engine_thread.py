"""The thread that owns an engine: takes jobs from a bounded inbox, steps the engine, hands its outputs on.

Any thread may `submit`, `cancel`, `stop` and `join`; `deliver`, `refuse` and `ended` are called on the engine's thread
and must not block. While nobody asks for anything the engine is still stepped, ever more rarely, so that copies of
blocks that were under way when the last answer ended are reported.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_adapter.base import RequestId
from engine_adapter.engine.engine import Engine, Output
from engine_adapter.engine.sampler import SamplingParams
from kvstore.errors import InvalidArgument, KvstoreError

__all__ = ["EngineThread", "Job"]

_FIRST_IDLE_S = 0.005
_LAST_IDLE_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request for the engine, tokenised; its id is unique among live ones."""

    id: RequestId
    token_ids: Sequence[int]
    params: SamplingParams


class EngineThread:
    """Runs `engine` until `stop`, which lets live requests finish, or until a step fails."""

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Callable[[Sequence[Output]], None],
        refuse: Callable[[RequestId, KvstoreError], None],
        ended: Callable[[BaseException | None], None],
        max_inbox: int = 1024,
    ) -> None:
        """`refuse` tells of a job that the engine does not take, `ended` of the thread's end and why if it broke."""
        self._engine = engine
        self._deliver = deliver
        self._refuse = refuse
        self._ended = ended
        self._max_inbox = max_inbox
        self._wake = threading.Condition()
        self._inbox: deque[Job | RequestId] = deque()  # an id: abort it
        self._stopping = False
        self._aborting = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to run."""
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queues a job; False when the inbox is full or the engine is stopping."""
        with self._wake:
            if self._stopping or len(self._inbox) >= self._max_inbox:
                return False
            self._inbox.append(job)
            self._wake.notify()
        return True

    def cancel(self, request_id: RequestId) -> None:
        """Aborts a job; its last output is delivered. An unknown id is ignored."""
        with self._wake:
            self._inbox.append(request_id)  # not bounded of itself: at most one a job that was accepted
            self._wake.notify()

    def stop(self, *, abort: bool = False) -> None:
        """No more jobs; the thread ends after the live ones, or at once with `abort`."""
        with self._wake:
            self._stopping = True
            self._aborting = self._aborting or abort
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended by the deadline."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        broken: BaseException | None = None
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: whoever serves must learn of it
            _log.exception("the engine failed")
            broken = error
        self._ended(broken)

    def _run(self) -> None:
        idle_s = _FIRST_IDLE_S
        while True:
            for item in self._take(idle_s):
                self._apply(item)
            if self._aborting or (self._stopping and not self._engine.has_work):
                return
            idle_s = _FIRST_IDLE_S if self._engine.has_work else min(2 * idle_s, _LAST_IDLE_S)
            outputs = self._engine.step()
            if outputs:
                self._deliver(outputs)
            if self._engine.has_work:
                self._engine.idle_wait()

    def _take(self, idle_s: float) -> list[Job | RequestId]:
        """What was asked since the last step; sleeps only when there is nothing at all to do."""
        with self._wake:
            if not self._inbox and not self._stopping and not self._engine.has_work:
                self._wake.wait(idle_s)
            items = list(self._inbox)
            self._inbox.clear()
        return items

    def _apply(self, item: Job | RequestId) -> None:
        if not isinstance(item, Job):
            output = self._engine.abort(item)
            if output is not None:
                self._deliver([output])
            return
        try:
            self._engine.add_request(item.token_ids, item.params, item.id)
        except InvalidArgument as error:
            self._refuse(item.id, error)
