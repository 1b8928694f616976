"""The owner: the store, the sessions, and what must happen after every batch of calls into the store.

All of the daemon's state is reached from here, on one event loop. After any call into the store its caller says
`settle_soon()`: once per turn of the loop the owner then passes on what the store decided (changed leases, slots in
hand, moves). A tick keeps time-driven work going: 50 times a second while something happens, 4 times otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from kvstore.config import ServeConfig
from kvstore.daemon.counters import Counters
from kvstore.daemon.decisions import Decisions
from kvstore.daemon.log import Log
from kvstore.daemon.requests import Requests
from kvstore.daemon.session import Session
from kvstore.errors import Aborted, NotFound, Unauthenticated
from kvstore.moves import SessionId, Slots
from kvstore.recorder import Event, NoRecorder, Recorder
from kvstore.store import Store
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Owner", "slots_message"]

_BUSY_TICK_S = 0.02
_IDLE_TICK_S = 0.25
_MAX_WRONG_LINES = 8
_MISREAD_INTERVAL_S = 10.0
_WRITTEN_LATER_MS = 600_000
"""A block may have been written so long after its last use that is known."""
_LOG = Log("owner")


class Owner:
    """Hub of the daemon. Not thread-safe: one loop owns it."""

    def __init__(
        self, *, store: Store, config: ServeConfig, boot_epoch: int, recorder: Recorder | None = None
    ) -> None:
        self.store = store
        self.recorder = NoRecorder() if recorder is None else recorder
        self.config = config
        self.boot_epoch = boot_epoch
        self.counters = Counters()
        self.requests = Requests(config.dram_bytes)
        self.started_s = time.monotonic()
        self.draining = False
        self.found_wrong = False
        """Whether any block was not what was stored."""
        self._misread_blocks = 0
        """That were not said yet."""
        self._misread_said_s = -_MISREAD_INTERVAL_S
        self.warnings: dict[str, str] = {}
        """By topic: what a person should act on, as Stats shows it."""
        self.decisions = Decisions(self.counters, self.recorder, self.warnings)
        self.sessions: dict[SessionId, Session] = {}
        self._by_digest: dict[bytes, Session] = {}
        self._settlers: list[Callable[[], None]] = []
        self._settling = False
        self._active = asyncio.Event()
        self.ahead_ms = 0  # of the steady clock

    def now_ms(self) -> int:
        """Wall-clock milliseconds that never go back nor stop: keys of recency are kept on disk across boots.

        Where the clock is set back they go on from where they were, at the pace of the steady clock.
        """
        steady_ms = time.monotonic_ns() // 1_000_000
        self.ahead_ms = max(self.ahead_ms, time.time_ns() // 1_000_000 - steady_ms)
        return steady_ms + self.ahead_ms

    def continue_after(self, newest_ms: int) -> None:
        """An earlier life used or cleared blocks until then: if the clock was set back since, time goes on behind that.

        Else a clear would be older than blocks that were written before it, and a start bring them back; or blocks
        older than a clear before them, and a start lose them.
        """
        if newest_ms <= self.now_ms():
            return
        _LOG.warning("the clock was set back: time goes on where it was", ms=newest_ms)
        self.ahead_ms = newest_ms + _WRITTEN_LATER_MS - time.monotonic_ns() // 1_000_000
        self.store.tick(self.now_ms())

    # ------------------------------------------------------------ sessions

    def add_session(self, session: Session) -> None:
        """Makes a session findable."""
        self.sessions[session.id] = session
        self._by_digest[session.digest] = session

    def remove_session(self, session: Session) -> None:
        """Forgets a session that the store has let go."""
        session.cancel_deadline()
        self.sessions.pop(session.id, None)
        self._by_digest.pop(session.digest, None)
        self.requests.session_ended(session)
        self.decisions.session_ended(session)
        if session.outbox is not None:
            session.outbox.fail(Aborted("the session has ended"))
            session.outbox = None

    def find_session(self, digest: bytes) -> Session | None:
        """The session of a token's digest."""
        return self._by_digest.get(digest)

    def require_session(self, digest: bytes) -> Session:
        """As `find_session`. Raises Unauthenticated."""
        session = self._by_digest.get(digest)
        if session is None:
            raise Unauthenticated("no session has this token: attach again")
        return session

    def require_session_id(self, number: int) -> Session:
        """By handle. Raises NotFound."""
        session = self.sessions.get(SessionId(number))
        if session is None:
            raise NotFound(f"no session {number}")
        return session

    # ------------------------------------------------------------ after calls

    def on_settle(self, settler: Callable[[], None]) -> None:
        """Has `settler` called after every batch; it must be cheap where there is nothing to do."""
        self._settlers.append(settler)

    def settle_soon(self) -> None:
        """To be called after any call into the store."""
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)
        self._active.set()

    def _settle(self) -> None:
        self._settling = False
        for number, leases in self.store.take_changed():
            session = self.sessions.get(number)
            if session is not None:
                session.post(changed=pb.Changed(leases=leases))
        if not self.draining:
            for session in self.sessions.values():
                self._top_up(session)
        for settler in self._settlers:
            settler()
        self.requests.work()
        self._say_wrong()
        self._say_misread()

    def _say_wrong(self) -> None:
        """A wrong block is the one thing that must never be: somebody has to look at this machine."""
        wrong = self.store.watching.take_wrong()
        for block in wrong[:_MAX_WRONG_LINES]:
            _LOG.error("wrong block", block=block.hash.hex(), where=block.where)
        if wrong:
            found = self.store.stats().counters["wrong_blocks"]
            self.found_wrong = True
            self.warnings["wrong blocks"] = (
                f"{found} blocks were not what was stored and were taken back: memory, a driver or an engine of this "
                "machine is at fault; see the log and `kvstore blackbox`"
            )

    def _say_misread(self) -> None:
        """What storage gave wrong, and a load has found: a line now and then, as where a mover finds it."""
        misread = self.store.watching.take_misread()
        self._misread_blocks += len(misread)
        now = time.monotonic()
        if misread and now - self._misread_said_s >= _MISREAD_INTERVAL_S:
            last, count = misread[-1], self._misread_blocks
            _LOG.warning(
                "blocks are not what was written", count=count, last=last.hash.hex(), where=last.where
            )
            self._misread_blocks, self._misread_said_s = 0, now

    def _top_up(self, session: Session) -> None:
        """Slots in hand, for sessions that asked and that can be told."""
        if session.wants and session.outbox is not None:
            slots = self.store.top_up(session.id, session.next_id())
            if slots is not None:
                session.post(slots=slots_message(slots))

    async def tick_forever(self) -> None:
        """Time-driven work: background eviction, write-behind, pins."""
        while True:
            self._active.clear()
            try:
                self.store.tick(self.now_ms())
                self._settle()
            except Exception:  # noqa: BLE001 (a task's boundary: one bad tick must not end all later ones)
                self.counters.add("internal_errors_total")
                self.recorder.note(Event.FAULT, a=os.getpid())
                _LOG.fault("tick failed")
            await asyncio.sleep(_BUSY_TICK_S)
            if self._active.is_set():
                continue  # mostly so while something happens, and waiting with a bound takes a task
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._active.wait(), _IDLE_TICK_S)


def slots_message(slots: Slots) -> pb.Slots:
    """Credit and room on the wire."""
    return pb.Slots(
        hbm_slots=slots.hbm_slots.tobytes(),
        hbm_generations=slots.hbm_generations.tobytes(),
        dram_slots=slots.dram_slots.tobytes(),
        dram_generations=slots.dram_generations.tobytes(),
    )
