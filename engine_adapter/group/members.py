"""The other processes of a model that is shared among devices, as the store sees them: `kvstore.client.Group`.

Each member has a link (`group_link`), and a thread here reads what it says. A member that ends takes the group along:
whoever waits for it is told, and nothing of what it should have copied is ever complete.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from engine_adapter.group.link import (
    Computing,
    Copied,
    Copy,
    Failed,
    Join,
    LinkMessage,
    Map,
    Mapped,
    Opened,
    receive,
    send,
)
from kvstore.errors import DeadlineExceeded, InvalidArgument, Unavailable

__all__ = ["MemberGroup"]

_START_S = 120.0
_NEWS_S = 1.0


class _Member:
    """One link. Its thread writes; whoever waits reads under the group's condition."""

    def __init__(self, number: int, link: socket.socket) -> None:
        self.number = number
        self.link = link
        self.sending = threading.Lock()
        self.opened: Opened | None = None
        self.mapped = 0  # answers to Map so far
        self.asked = 0  # Maps so far
        self.ended = ""  # why it has


class MemberGroup:
    """See the module. Any thread."""

    def __init__(self, links: Sequence[socket.socket]) -> None:
        """`links`: of members 1, 2, …; they stay the caller's, who closes them after the session."""
        self._news = threading.Condition()
        self._members = [_Member(number, link) for number, link in enumerate(links, start=1)]
        self._on_copied: Callable[[int], None] = lambda _: None
        for member in self._members:
            threading.Thread(
                target=self._listen, args=(member,), name=f"kvstore-member-{member.number}", daemon=True
            ).start()

    def on_copied(self, listener: Callable[[int], None]) -> None:
        """Has `listener` called, on a thread of ours, with the number of each copy that a member completes."""
        self._on_copied = listener

    @property
    def members(self) -> int:
        """See Group."""
        return len(self._members) + 1

    @property
    def uuids(self) -> list[str]:
        """See Group. Waits until the devices are open."""
        return [opened.uuid for opened in self._devices()]

    @property
    def identities(self) -> list[str]:
        """See Group. Waits until the devices are open."""
        return [opened.identity for opened in self._devices()]

    def _devices(self) -> list[Opened]:
        self._wait(lambda member: member.opened is not None, "opened its device")
        return [member.opened for member in self._members if member.opened is not None]

    def join(self, path: str, token: bytes, slot_bytes: int, device: int) -> None:
        """See Group."""
        self.tell(Join(path=path, token=token.hex(), slot_bytes=slot_bytes, device=device))

    def wait_joined(self, num_pages: int) -> None:
        """See Group."""
        with self._news:
            for member in self._members:
                member.asked += 1
        self.tell(Map(pages=num_pages))
        self._wait(lambda member: member.mapped >= member.asked, "mapped its memory")

    def check(self) -> None:
        """See Group. What has failed may be known a moment before the end of the process that was its cause."""
        with self._news:
            self._news.wait_for(lambda: any(member.ended for member in self._members), _NEWS_S)
        self._wait(lambda _: True, "")

    def tell(self, message: Join | Map | Copy | Computing) -> None:
        """Sends a message to each. Raises: Unavailable where one has gone."""
        for member in self._members:
            try:
                with member.sending:
                    send(member.link, message)
            except OSError as error:
                raise Unavailable(f"process {member.number} of the model has gone: {error}") from error

    def _wait(self, ready: Callable[[_Member], bool], what: str) -> None:
        def settled() -> bool:
            return any(member.ended for member in self._members) or all(map(ready, self._members))

        with self._news:
            in_time = self._news.wait_for(settled, _START_S)
            for member in self._members:
                if member.ended:
                    raise Unavailable(f"process {member.number} of the model {member.ended}")
                if not in_time and not ready(member):
                    raise DeadlineExceeded(
                        f"process {member.number} of the model has not {what} within {_START_S:g} s"
                    )

    def _listen(self, member: _Member) -> None:
        why = "has ended"
        try:
            while (message := receive(member.link)) is not None:
                if isinstance(message, Failed):
                    why = f"has ended: {message.text}"
                else:
                    self._take(member, message)
        except (OSError, InvalidArgument) as error:
            why = f"cannot be heard: {error}"
        with self._news:
            member.ended = why
            self._news.notify_all()

    def _take(self, member: _Member, message: LinkMessage) -> None:
        if isinstance(message, Copied):
            self._on_copied(message.number)
            return
        with self._news:
            if isinstance(message, Opened):
                member.opened = message
            elif isinstance(message, Mapped):
                member.mapped += 1
            self._news.notify_all()
