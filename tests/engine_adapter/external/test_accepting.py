"""A thread that takes connections ends with its listener, and by nothing else."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from engine_adapter.external import accepting
from engine_adapter.external.accepting import accepted
from kvstore.errors import PermissionDenied


class Listener:
    """Gives what it was told to, in turn: a connection, or the error with that number."""

    def __init__(self, *turns: socket.socket | int) -> None:
        self._turns = list(turns)

    def accept(self) -> tuple[socket.socket, str]:
        """See socket.socket."""
        turn = self._turns.pop(0)
        if isinstance(turn, int):
            raise OSError(turn, os.strerror(turn))
        return turn, ""


@pytest.fixture
def peers() -> Any:
    """Both ends of a connection."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("closed", [errno.EBADF, errno.EINVAL])
def test_a_process_without_descriptors_tries_again(peers: Any, closed: int) -> None:
    """Any error ended the thread: a rank that once had no descriptor left could never join a session again."""
    listener: Any = Listener(errno.EMFILE, errno.ECONNABORTED, peers[0], closed)
    assert list(accepted(listener)) == [peers[0]]


def test_a_connection_of_another_user_is_closed(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: socket.socket) -> None:
        raise PermissionDenied("of another user")

    monkeypatch.setattr(accepting, "check_peer", refuse)
    listener: Any = Listener(peers[0], errno.EBADF)
    assert list(accepted(listener)) == []
    assert peers[1].recv(1) == b"", "nobody is left at the other end"


def test_the_end_of_a_listener_ends_it() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0kvstore-test-accepting")
        listener.listen(1)
        listener.shutdown(socket.SHUT_RDWR)
        assert list(accepted(listener)) == []
