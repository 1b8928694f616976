"""Whose process is at the other end of a unix socket."""

from __future__ import annotations

import os
import socket
import struct

from kvstore.errors import PermissionDenied

__all__ = ["check_peer"]

_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


def check_peer(connection: socket.socket) -> None:
    """Memory is shared inside one trust domain: with this process's own user, and root. Raises PermissionDenied."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    if uid not in (os.geteuid(), 0):
        raise PermissionDenied(f"process {pid} is of uid {uid}: memory is not shared with it")
