"""Connections of our own user's processes, for a thread that lives by them."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Iterator

from kvstore.errors import KvstoreError
from kvstore.wire.peer import check_peer

__all__ = ["accepted"]

_LOG = logging.getLogger("kvstore.engine")
_CLOSED = (errno.EBADF, errno.EINVAL)  # EINVAL: shut down
_RETRY_S = 0.05


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Blocks for one connection after the other, until the listener is closed or shut down; each is the caller's.

    A process of another user is refused. One that went again is passed over, and where there is no descriptor left, or
    no memory, the next is tried a little later: whoever connected waits.
    """
    while True:
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            _LOG.warning("a connection could not be taken: %s", error)
            time.sleep(_RETRY_S)
            continue
        try:
            check_peer(peer)
        except (KvstoreError, OSError) as error:
            _LOG.warning("a connection is refused: %s", error)
            with contextlib.suppress(OSError):
                peer.close()
            continue
        yield peer
