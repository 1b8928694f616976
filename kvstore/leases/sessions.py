"""Sessions and namespaces: who is attached, what it may name, and the grants it has not confirmed.

Owns the session and namespace columns and, beside them, what a session's stream needs in memory: it is lost with the
daemon on purpose, because a client resumes by stating what it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.cache_use import CacheUse
from kvstore.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvstore.layout import Columns, SessionState
from kvstore.moves import U32, NamespaceId, SessionId
from kvstore.tables.slots import ClassKey

__all__ = ["NO_DEVICE", "Namespaces", "Session", "Sessions"]

NO_DEVICE = 255
"""`session_device` of a session without owned HBM."""
_DIGEST_BYTES = 16
_NAME_BYTES = 128
_ATTACHED = int(SessionState.ATTACHED)


@dataclass(frozen=True, slots=True)
class _Unseen:
    """Slots of one grant that the client may not have read yet."""

    grant_id: int
    hbm: U32
    dram: U32
    ahead: bool  # credit and room


@dataclass(slots=True, kw_only=True)
class Session:
    """One session, as the store works with it."""

    id: SessionId
    device: int | None
    slot_bytes: int
    holder: np.uint64  # its bit
    namespaces: set[int] = field(default_factory=set)
    use: int = int(CacheUse.ON.access)
    """What it allows itself; said when it attaches and when it resumes."""
    verifies: bool = False
    """It compares what it loads with its checksum; said when it attaches and when it resumes."""
    namespace: int = -1
    """That it acquired in last; below 0: in none yet."""
    want_slots: int = 0
    """HBM slots ahead that are still due to it."""
    want_room: int = 0
    """DRAM slots ahead that are still due to it."""
    held_bound: int = 0
    """At least as many slots as it holds; counted again when it reaches the limit."""
    unseen: deque[_Unseen] = field(default_factory=deque)

    @property
    def hbm_key(self) -> ClassKey | None:
        """Class of its HBM slots; None without owned HBM."""
        return None if self.device is None else ClassKey(device=self.device, slot_bytes=self.slot_bytes)

    @property
    def dram_key(self) -> ClassKey:
        """Class of its DRAM slots."""
        return ClassKey(device=0, slot_bytes=self.slot_bytes)

    def granted(self, grant_id: int, hbm: U32, dram: U32, *, ahead: bool, limit: int) -> None:
        """Remembers what a message grants until the client has seen it."""
        if len(hbm) or len(dram):
            self.unseen.append(_Unseen(grant_id, hbm, dram, ahead))
            if len(self.unseen) > limit:
                self.unseen.popleft()

    def wants(self, slots: int, room: int) -> None:
        """What the client lacks, as of the newest message it has seen: what is on its way to it is not due again."""
        ahead = [grant for grant in self.unseen if grant.ahead]
        self.want_slots = max(0, slots - sum(len(grant.hbm) for grant in ahead))
        self.want_room = max(0, room - sum(len(grant.dram) for grant in ahead))

    def seen(self, grant_id: int) -> None:
        """The client has read everything up to this message."""
        while self.unseen and self.unseen[0].grant_id <= grant_id:
            self.unseen.popleft()

    def not_granted_since(self, hbm: U32, dram: U32) -> tuple[U32, U32]:
        """What of a release counts: a slot that was granted again after the client decided is not released (rule B)."""
        if self.unseen:
            if len(hbm):
                hbm = hbm[~np.isin(hbm, np.concatenate([grant.hbm for grant in self.unseen]))]
            if len(dram):
                dram = dram[~np.isin(dram, np.concatenate([grant.dram for grant in self.unseen]))]
        return hbm, dram


class Sessions:
    """The session table."""

    __slots__ = ("_columns", "_live")

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._live: dict[int, Session] = {}
        for session in np.flatnonzero(columns.session_state != SessionState.FREE).tolist():
            self._live[session] = self._load(session)

    def _load(self, session: int) -> Session:
        device = int(self._columns.session_device[session])
        return Session(
            id=SessionId(session),
            device=None if device == NO_DEVICE else device,
            slot_bytes=int(self._columns.session_slot_bytes[session]),
            holder=np.uint64(1 << session),
        )

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def attach(
        self,
        *,
        now_ms: int,
        name: str,
        token_digest: bytes,
        device: int | None,
        slot_bytes: int,
        members: int,
        identity: int = 0,
    ) -> Session:
        """A new session, ATTACHING. Raises: ResourceExhausted when all are taken; InvalidArgument."""
        columns = self._columns
        if len(token_digest) != _DIGEST_BYTES or not 1 <= members <= 255:
            raise InvalidArgument("a token digest of 16 bytes and 1 to 255 members are needed")
        if device is not None and not 0 <= device < columns.shape.devices:
            raise InvalidArgument(f"device {device} is not one of {columns.shape.devices}")
        if slot_bytes <= 0 or slot_bytes % 4096:
            raise InvalidArgument(f"a slot is a positive multiple of 4096 bytes, not {slot_bytes}")
        free = np.flatnonzero(columns.session_state == SessionState.FREE)
        if not len(free):
            raise ResourceExhausted(
                f"all {columns.shape.max_sessions} sessions are attached", retry_after_s=5.0
            )
        session = int(free[0])
        encoded = name.encode()[:_NAME_BYTES].decode(errors="ignore").encode()
        columns.session_name[session] = np.frombuffer(encoded.ljust(_NAME_BYTES, b"\0"), dtype=np.uint8)
        columns.session_token[session] = np.frombuffer(token_digest, dtype=np.uint8)
        columns.session_device[session] = NO_DEVICE if device is None else device
        columns.session_slot_bytes[session] = slot_bytes
        columns.session_identity[session] = identity
        columns.session_members[session] = members
        columns.session_since[session] = now_ms
        columns.session_state[session] = SessionState.ATTACHING
        self._live[session] = self._load(session)
        return self._live[session]

    def find(self, token_digest: bytes) -> SessionId | None:
        """The session of a token."""
        wanted = np.frombuffer(token_digest, dtype=np.uint8)
        if len(wanted) != _DIGEST_BYTES:
            return None
        same = (self._columns.session_token == wanted).all(axis=1)
        same &= self._columns.session_state != SessionState.FREE
        return SessionId(int(same.argmax())) if same.any() else None

    def get(self, session: int) -> Session:
        """A session in whatever state. Raises: NotFound."""
        found = self._live.get(session)
        if found is None:
            raise NotFound(f"no session {session}")
        return found

    def attached(self, session: int) -> Session:
        """A session that may be given something. Raises: NotFound, FailedPrecondition."""
        found = self.get(session)
        if int(self._columns.session_state[session]) != _ATTACHED:
            raise FailedPrecondition(f"session {session} is {self.state(session).name.lower()}: attach again")
        return found

    def state(self, session: int) -> SessionState:
        """State of a session."""
        return SessionState(int(self._columns.session_state[session]))

    def set_state(self, session: int, state: SessionState) -> None:
        """Changes the state; FREE forgets it."""
        if state is SessionState.FREE:
            self._live.pop(session, None)
            self._columns.session_state[session] = SessionState.FREE
            self._columns.session_token[session] = 0
        else:
            self._columns.session_state[session] = state

    def name(self, session: int) -> str:
        """Its name, for people."""
        return bytes(self._columns.session_name[session]).rstrip(b"\0").decode(errors="replace")

    def mapping(self, key: ClassKey) -> list[Session]:
        """Sessions, in whatever state, that map the HBM of this class."""
        return [session for session in self._live.values() if session.hbm_key == key]

    def all_verify(self) -> bool:
        """Whether there is a session, and each compares what it loads."""
        return bool(self._live) and all(session.verifies for session in self._live.values())

    def holders(self) -> np.uint64:
        """The bits of all sessions there are."""
        return np.uint64(sum(1 << session for session in self._live))


def _nobody(_handle: NamespaceId, _digest: bytes) -> None:
    """Nobody wants to know."""


class Namespaces:
    """The namespace table. Two digests are the same when their first 16 bytes are: that is what storage keeps."""

    __slots__ = ("_by_digest", "_columns", "on_new")

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        used: NDArray[np.intp] = np.flatnonzero(columns.namespace_digest.any(axis=1))
        self._by_digest = {bytes(columns.namespace_digest[i, :_DIGEST_BYTES]): int(i) for i in used}
        self.on_new: Callable[[NamespaceId, bytes], None] = _nobody
        """Called with each new handle and the first 16 bytes of its digest, before anything is of that namespace."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def intern(self, digest: bytes, in_use: NDArray[np.bool_] | None) -> NamespaceId | None:
        """Handle of a digest of 16 to 32 bytes, made when it is new.

        `in_use` ([namespaces]) allows a handle outside it to be taken over when the table is full; None forbids it.
        None is returned when there is no room. Raises: InvalidArgument.
        """
        if not _DIGEST_BYTES <= len(digest) <= 32 or not any(digest[:_DIGEST_BYTES]):
            raise InvalidArgument("a namespace digest is 16 to 32 bytes, the first 16 not all zero")
        short = digest[:_DIGEST_BYTES]
        found = self._by_digest.get(short)
        if found is not None:
            return NamespaceId(found)
        column = self._columns.namespace_digest
        free = np.flatnonzero(~column[:, :_DIGEST_BYTES].any(axis=1))
        if not len(free):
            if in_use is None:
                return None
            free = np.flatnonzero(~in_use)
            if not len(free):
                return None
            self._by_digest.pop(bytes(column[free[0], :_DIGEST_BYTES]))
        handle = int(free[0])
        column[handle] = np.frombuffer(digest.ljust(32, b"\0"), dtype=np.uint8)
        self._by_digest[short] = handle
        self.on_new(NamespaceId(handle), short)
        return NamespaceId(handle)

    def handles(self) -> Mapping[bytes, NamespaceId]:
        """By the first 16 bytes of each digest."""
        return {short: NamespaceId(handle) for short, handle in self._by_digest.items()}

    def digests16(self, namespaces: U32) -> NDArray[np.uint64]:
        """[n, 2] first 16 bytes of each digest."""
        short = self._columns.namespace_digest[namespaces, :_DIGEST_BYTES]
        return np.ascontiguousarray(short).view("<u8").reshape(-1, 2)
