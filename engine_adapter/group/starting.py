"""Starts a member whose pages the store keeps: `engine_adapter.group.member`, seen from the process that schedules."""

from __future__ import annotations

import contextlib
import socket

from engine_adapter.engine.parallel.member import Member, MemberPlan

__all__ = ["StoreMember"]


class StoreMember(Member):
    """A member whose pages the store keeps (`engine_adapter.group.member`). `link` is this end of its link."""

    def __init__(self, plan: MemberPlan) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            super().__init__(plan, "engine_adapter.group.member", [("--link", theirs)])

    def close(self) -> None:
        """See Member. After the session was given up: it ends with its link."""
        with contextlib.suppress(OSError):  # it has gone already
            self.link.shutdown(socket.SHUT_RDWR)
        super().close()
        self.link.close()
