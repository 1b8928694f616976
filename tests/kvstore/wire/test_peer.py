"""Whose process is at the other end."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import pytest

from kvstore.errors import PermissionDenied
from kvstore.wire.peer import check_peer

ME = 4242


class Connection:
    """One whose other end is a process of this user."""

    def __init__(self, uid: int) -> None:
        self._credentials = struct.pack("3i", 77, uid, 0)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        """See socket.socket."""
        assert (level, option, nbytes) == (socket.SOL_SOCKET, socket.SO_PEERCRED, len(self._credentials))
        return self._credentials


def of(uid: int) -> Any:
    return Connection(uid)


def test_the_same_user_and_root_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    check_peer(of(ME))
    check_peer(of(0))


def test_another_user_may_not_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    with pytest.raises(PermissionDenied, match="process 77 is of uid 4243"):
        check_peer(of(ME + 1))


def test_root_does_not_share_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(PermissionDenied):
        check_peer(of(ME))


def test_what_the_kernel_says_of_a_real_one_is_understood() -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    check_peer(ends[0])
    for end in ends:
        end.close()
