"""How the ranks of an engine come into a session: the scheduling process tells each where to present itself.

    scheduling process → rank     Join {path, token, slot_bytes}
    rank → scheduling process     Mapped {}     Failed {text}

A rank listens on a name in the abstract namespace, which leaves no file behind and which the engine carries to the
scheduling process; both ends look at the other's uid. One connection a Join, again when a session was renewed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from engine_adapter.external.accepting import accepted
from engine_adapter.group.link import Failed, Join, Mapped, receive, send
from kvstore.errors import KvstoreError, Unavailable
from kvstore.wire.peer import check_peer

__all__ = ["RankGroup", "RankListener"]

_LOG = logging.getLogger("kvstore.engine")
_BACKLOG = 4


class RankListener:
    """A rank's end. `join` is called on a thread of ours with each Join, and raises KvstoreError where it cannot."""

    def __init__(self, join: Callable[[Join], None], *, timeout_s: float) -> None:
        self.name = f"kvstore-rank-{secrets.token_hex(16)}"
        self._join = join
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="kvstore-rank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        for peer in accepted(self._socket):
            with peer:
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(self._timeout_s)
        try:
            message = receive(peer)
            if isinstance(message, Join):
                self._join(message)
                send(peer, Mapped())
        except (KvstoreError, OSError) as error:
            _LOG.warning("this rank cannot join the store's session: %s", error)
            with contextlib.suppress(OSError):
                send(peer, Failed(text=" ".join(str(error).split())[:400]))


class RankGroup:
    """The ranks, for the process that attaches (`kvstore.client.group.Group`). None of them has HBM of the store's."""

    def __init__(self, names: Sequence[str], *, timeout_s: float) -> None:
        """`names`: of the ranks' listeners, in the order of the ranks."""
        self._names = tuple(names)
        self._timeout_s = timeout_s
        self._asked: list[socket.socket] = []

    @property
    def members(self) -> int:
        """See Group."""
        return 1 + len(self._names)

    @property
    def uuids(self) -> Sequence[str]:
        """See Group."""
        return ()

    @property
    def identities(self) -> Sequence[str]:
        """See Group."""
        return ()

    def join(self, path: str, token: bytes, slot_bytes: int, device: int) -> None:
        """See Group."""
        self._forget()
        message = Join(path=path, token=token.hex(), slot_bytes=slot_bytes, device=device)
        for number, name in enumerate(self._names):
            asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._asked.append(asked)
            asked.settimeout(self._timeout_s)
            try:
                asked.connect(f"\0{name}")
                check_peer(asked)
                send(asked, message)
            except OSError as error:
                self._forget()
                raise Unavailable(
                    f"rank {number} of the engine is not on this machine, or has gone: {error}"
                ) from error

    def wait_joined(self, num_pages: int) -> None:
        """See Group. There are no pages."""
        assert not num_pages
        try:
            for number, asked in enumerate(self._asked):
                self._await(number, asked)
        finally:
            self._forget()

    def check(self) -> None:
        """See Group. The session did not come about, and what a rank says of it nobody waits for."""
        self._forget()

    @staticmethod
    def _await(number: int, asked: socket.socket) -> None:
        try:
            answer = receive(asked)
        except OSError as error:
            raise Unavailable(f"rank {number} of the engine does not answer: {error}") from error
        if not isinstance(answer, Mapped):
            why = answer.text if isinstance(answer, Failed) else "it has gone"
            raise Unavailable(f"rank {number} of the engine cannot join: {why}")

    def _forget(self) -> None:
        for asked in self._asked:
            asked.close()
        self._asked = []
