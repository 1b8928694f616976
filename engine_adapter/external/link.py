"""The way to the store of an engine that must start, and go on, whether or not a daemon is there.

A thread of its own attaches, opens namespaces and reads what identifies a model, so that the engine's scheduler waits
for nothing: until there is a session, or the namespace of a request is open, there is no cache. Once attached the
session itself comes back after whatever dies (`kvstore.client.stream`). What is on its way back is worth a bounded
wait of a request, and only this module says what is: a daemon that went a moment ago (`expected`), a namespace that is
being opened (`coming`), and disks that a daemon has not read yet (`settled`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from engine_adapter.external.settling import Settling
from kvstore.cache_use import Access, CacheUse
from kvstore.client import Client, Namespace, Session, Targets, connect
from kvstore.client.group import Group
from kvstore.errors import KvstoreError
from kvstore.geometry import Geometry

__all__ = ["Identity", "LinkPlan", "StoreLink"]

_LOG = logging.getLogger("kvstore.engine")
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
_SAY_AGAIN_S = 60.0
_MAX_OPEN = 256
"""Namespaces that are known at one time: adapters and salts of requests. The least recently used is asked for again."""
_MAX_WANTED = 64
_ROOM_SHARE = 0.125
_LOOK_AGAIN_S = 0.05
"""At a daemon that is still opening its disks."""
_TRY_AGAIN_S = 5.0
"""A namespace that could not be opened is a miss for so long, then it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What sets requests of one engine apart. All that they share is in the parts of the engine."""

    adapter: tuple[str, str] | None = None  # name and folder of a LoRA
    salt: str | None = None
    epoch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """How to attach. `group` and `parts` are called on the link's thread, and may wait.

    `room_blocks`: DRAM slots that stores like to have in hand; a part of DRAM is the most.
    """

    socket: str | None
    name: str
    timeout_s: float
    geometry: Geometry
    group: Group | None
    room_blocks: int
    parts: Callable[[Identity], Mapping[str, bytes]]
    """The parts of a namespace. Raises KvstoreError for what cannot be cached."""
    breaker_s: float = 1.0
    return_s: float = 5.0
    """How long after it went, or fell silent, a daemon is expected back; and its disks to be read once it is."""
    use: CacheUse = CacheUse.ON
    """What this engine does with the cache. Its scheduling asks the session; ranks are told of nothing else."""
    tenant: str = ""
    """Part of every namespace; empty: nobody's in particular."""


class StoreLink:
    """See the module. The scheduler's thread calls; it never waits except in `close`."""

    def __init__(self, plan: LinkPlan) -> None:
        self._plan = plan
        self._return_s = max(plan.return_s, plan.breaker_s)
        self._session: Session | None = None
        self._open: OrderedDict[Identity, Namespace | float] = OrderedDict()  # or when to try again
        self._wanted: dict[Identity, None] = {
            Identity(): None
        }  # that of most requests, before the first of them
        self._work = threading.Condition()
        self._closing = False
        self._settling = Settling(plan.return_s)
        self._said_at = -_SAY_AGAIN_S
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The session while it is attached and the daemon answers; None: there is no cache now."""
        session = self._session
        return session if session is not None and session.available else None

    @property
    def attached(self) -> Session | None:
        """The session, also while the daemon is away: what was begun in it has to be ended."""
        return self._session

    @property
    def expected(self) -> Session | None:
        """As `session`, and also while the daemon has been away or silent for a short time only: its keeper starts
        another. None: nothing is worth waiting for."""
        session = self._session
        return session if session is not None and session.silence_s < self._return_s else None

    @property
    def settled(self) -> bool:
        """Whether the daemon knows all that its disks hold; else a miss may be a hit a moment later."""
        session = self._session
        if session is None or self._settling.known(session):
            return True
        with self._work:
            self._work.notify()
        return False

    def namespace(self, identity: Identity) -> Namespace | None:
        """The namespace where it is open; else None, and it is being opened unless that was refused lately."""
        with self._work:
            found = self._open.get(identity)
            if isinstance(found, Namespace):
                self._open.move_to_end(identity)
                return found
            if self._comes(identity) and len(self._wanted) < _MAX_WANTED:
                self._wanted[identity] = None
                self._work.notify()
        return None

    def coming(self, identity: Identity) -> bool:
        """Whether it is worth waiting for a namespace that is not open."""
        with self._work:
            return self._session is not None and self._comes(identity)

    def close(self, timeout_s: float) -> None:
        """Gives the session up. Nothing copies any more."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(timeout_s)

    def _comes(self, identity: Identity) -> bool:
        found = self._open.get(identity)
        return not isinstance(found, float) or time.monotonic() >= found

    def _run(self) -> None:
        with ExitStack() as stack:
            client = stack.enter_context(connect(self._plan.socket, timeout_s=self._plan.timeout_s))
            session = self._attach(stack, client)
            while session is not None and self._await_work(session):
                wanted = self._first_wanted()
                if wanted is not None:
                    self._open_one(session, wanted)
                if not self._settling.known(session):
                    self._settling.look(session, client)

    def _attach(self, stack: ExitStack, client: Client) -> Session | None:
        """Tries until it is attached or closed."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                session = client.attach(
                    self._plan.name,
                    self._plan.geometry,
                    targets=self._targets(client),
                    group=self._plan.group,
                    use=self._plan.use,
                )
            except (KvstoreError, OSError) as error:
                self._say("no cache: the store cannot be reached: %s", error)
            else:
                self._session = stack.enter_context(session)
                _LOG.info("attached to the store")
                return session
            with self._work:
                if self._closing or self._work.wait_for(lambda: self._closing, pause_s):
                    return None
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)

    def _targets(self, client: Client) -> Targets:
        """Slots in hand hold nothing that anybody could hit, so they are a part of DRAM at most. Who stores nothing
        needs none."""
        capacity_bytes = next(
            (tier.capacity_bytes for tier in client.stats().tiers if tier.tier == "dram"), 0
        )
        most = int(_ROOM_SHARE * capacity_bytes) // self._plan.geometry.slot_bytes
        stores = self._plan.use.access & Access.WRITES
        room = max(1, min(self._plan.room_blocks, most)) if stores else 0
        return Targets(credit=0, room=room, breaker_s=self._plan.breaker_s)

    def _await_work(self, session: Session) -> bool:
        """Returns when there is something to do; False: it is closed."""
        known = self._settling.known(session)
        with self._work:
            if known:
                self._work.wait_for(
                    lambda: self._closing or self._wanted or not self._settling.known(session)
                )
            else:
                self._work.wait_for(lambda: self._closing or self._wanted, _LOOK_AGAIN_S)
            return not self._closing

    def _first_wanted(self) -> Identity | None:
        with self._work:
            return next(iter(self._wanted), None)

    def _open_one(self, session: Session, identity: Identity) -> None:
        opened: Namespace | float
        try:
            opened = session.open_namespace({**self._plan.parts(identity), **self._tenant})
        except Exception as error:  # noqa: BLE001 (the engine's facts, a request's salt: all others go on)
            self._say("requests of one kind are not cached: %s", error)
            opened = time.monotonic() + _TRY_AGAIN_S
        with self._work:
            self._wanted.pop(identity, None)
            self._open[identity] = opened
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)

    @property
    def _tenant(self) -> Mapping[str, bytes]:
        return {"tenant": self._plan.tenant.encode()} if self._plan.tenant else {}

    def _say(self, text: str, error: Exception) -> None:
        """One line now and then: what cannot be reached is asked for all the time."""
        now = time.monotonic()
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            _LOG.warning(text, error)
