"""HELLOs that meet each other: sessions and their members, without a daemon around them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.daemon.sessions import Member, Sessions
from kvstore.errors import AlreadyExists, Unavailable

WAIT_S = 5.0


class SlowKept:
    """A keeper that confirms when it is told to."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.adds = 0
        self.confirm = asyncio.Event()
        self.fails = False

    async def add(self, fds: Mapping[str, int]) -> None:
        self.adds += 1
        await self.confirm.wait()
        if self.fails:
            raise Unavailable("the keeper did not confirm")
        self.held |= fds

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.held.pop(name, None)


class Rig:
    """One session of one member."""

    def __init__(self) -> None:
        self.kept = SlowKept()
        self.session: Any = SimpleNamespace(
            id=3,
            digest=b"d" * 16,
            members=1,
            presented=False,
            lost=False,
            deadline=None,
            all_here=asyncio.Event(),
            cancel_deadline=lambda: None,
        )
        store = SimpleNamespace(activate=lambda _: None)
        self.owner: Any = SimpleNamespace(sessions={3: self.session}, store=store)
        self.sessions = Sessions(self.owner, self.kept)  # type: ignore[arg-type]
        self.sockets: list[socket.socket] = []

    def hello(self) -> asyncio.Task[Member]:
        """This process presents itself on a new connection."""
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        return asyncio.create_task(self.sessions.present(self.session, 0, ours, os.pidfd_open(os.getpid())))

    def close(self) -> None:
        for member in self.sessions.members():
            member.life.stop()
        for end in self.sockets:
            end.close()


def test_of_two_hellos_at_one_time_one_is_refused() -> None:
    """Both passed, the keeper had the descriptors of one and the daemon watched those of the other."""

    async def work() -> None:
        rig = Rig()
        tasks = [rig.hello(), rig.hello()]
        await asyncio.sleep(0)
        rig.kept.confirm.set()
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
        (member,) = [answer for answer in answers if isinstance(answer, Member)]
        (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
        assert isinstance(refused, AlreadyExists)
        assert rig.kept.adds == 1
        assert set(rig.kept.held.values()) == {member.life.pidfd, member.connection.fileno()}
        assert rig.sessions.members() == [member]
        with pytest.raises(AlreadyExists):  # and as ever, of two that follow each other
            await asyncio.wait_for(rig.hello(), WAIT_S)
        rig.close()

    asyncio.run(work())


def test_a_hello_that_failed_may_be_tried_again() -> None:
    async def work() -> None:
        rig = Rig()
        rig.kept.confirm.set()
        rig.kept.fails = True
        with pytest.raises(Unavailable):
            await asyncio.wait_for(rig.hello(), WAIT_S)
        rig.kept.fails = False
        await asyncio.wait_for(rig.hello(), WAIT_S)
        rig.close()

    asyncio.run(work())


def test_a_second_hello_that_fails_leaves_the_first_watched() -> None:
    """A process whose new HELLO failed was no member any more: nobody saw it die, and its slots were held for ever."""

    async def work() -> None:
        rig = Rig()
        rig.kept.confirm.set()
        first = await asyncio.wait_for(rig.hello(), WAIT_S)
        first.life.socket_closed()  # its connection was lost: the same process may come again
        rig.kept.fails = True
        with pytest.raises(Unavailable):
            await asyncio.wait_for(rig.hello(), WAIT_S)
        assert rig.sessions.members() == [first]
        rig.kept.fails = False
        second = await asyncio.wait_for(rig.hello(), WAIT_S)
        assert rig.sessions.members() == [second]
        assert set(rig.kept.held.values()) == {second.life.pidfd, second.connection.fileno()}
        rig.close()

    asyncio.run(work())
