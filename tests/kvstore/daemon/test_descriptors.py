"""What the descriptor socket does when descriptors are short, without a daemon around it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.daemon import descriptors as module
from kvstore.daemon.descriptors import DescriptorServer
from kvstore.daemon.notify import Notifier
from kvstore.layout import Tier
from kvstore.wire import descriptors as wire

WAIT_S = 5.0


def extent(number: int) -> Any:
    """What a message says of an extent of DRAM, and whom it concerns."""
    return SimpleNamespace(
        extent=number,
        tier=Tier.DRAM,
        device=0,
        nbytes=4096,
        slot_bytes=0,
        slot_base=0,
        slots=0,
        identity=bytes(16),
    )


class FakeMemory:
    """Extents, and whoever listens for them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.infos: list[Any] = []
        self.on_extent: Any = None

    def listen(self, on_extent: Any, _on_drop: Any) -> None:
        self.on_extent = on_extent

    def extents(self, tier: Tier) -> list[tuple[Any, int]]:
        return [(info, self.fd) for info in self.infos if info.tier is tier]

    def shards(self, _extent: int) -> tuple[int, ...]:
        return (self.fd,)

    def add(self, number: int) -> None:
        self.infos.append(extent(number))
        self.on_extent(self.infos[-1], self.fd)


class Rig:
    """A server with one member, whose end is `peer`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test")
        self.memory = FakeMemory(self.fd)
        ours, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.setblocking(False)
        session = SimpleNamespace(id=1, device=None, slot_bytes=0)
        owner: Any = SimpleNamespace(sessions={1: session})
        sessions: Any = SimpleNamespace(on_member_gone=lambda _: None)
        server = DescriptorServer(owner=owner, sessions=sessions, memory=self.memory, tables_fd=self.fd)  # type: ignore[arg-type]
        member: Any = SimpleNamespace(session=1, number=0, connection=ours)
        server.adopt(member)
        self.connection = server._members[1, 0]  # type: ignore[index]

    async def receive(self) -> wire.Received:
        """The next message; its descriptors are closed."""

        async def ask() -> wire.Received:
            while True:
                try:
                    received = wire.receive(self.peer)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                    continue
                assert received is not None
                received.close()
                return received

        return await asyncio.wait_for(ask(), WAIT_S)

    async def first_set(self) -> list[int]:
        """Extents up to the next Ready."""
        found = []
        while not isinstance((message := (await self.receive()).message), wire.Ready):
            if isinstance(message, wire.Extent):
                found.append(message.extent)
        return found

    def close(self) -> None:
        self.connection.stop()
        self.connection.socket.close()
        self.peer.close()
        os.close(self.fd)


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM])
def test_an_extent_that_the_kernel_does_not_take_now_is_sent_later(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Extent message was lost where a user had too many descriptors in flight: the member never mapped its slots."""
    real, failures = wire.send, [number] * 3

    def send(sock: socket.socket, message: wire.Message, fds: Sequence[int] = ()) -> None:
        if fds and failures:
            raise OSError(failures.pop(), "short")
        real(sock, message, fds)

    async def work() -> None:
        rig = Rig()
        assert await rig.first_set() == []
        monkeypatch.setattr(module.wire, "send", send)
        for extent_number in (4, 5):
            rig.memory.add(extent_number)
        for extent_number in (4, 5):
            received = await rig.receive()
            assert isinstance(received.message, wire.Extent)
            assert (received.message.extent, len(received.fds)) == (extent_number, 1)
        assert not failures
        rig.close()

    asyncio.run(work())


def test_an_extent_that_cannot_even_be_queued_comes_with_a_new_first_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of descriptors, the daemon lost an Extent message and failed in the middle of adding the extent."""
    real, failures = os.dup, [errno.EMFILE]

    def dup(fd: int) -> int:
        if failures:
            raise OSError(failures.pop(), "too many open files")
        return real(fd)

    async def work() -> None:
        rig = Rig()
        assert await rig.first_set() == []
        monkeypatch.setattr(module.os, "dup", dup)
        rig.memory.add(4)
        assert await rig.first_set() == [4]
        rig.close()

    asyncio.run(work())


class ShortOnce:
    """A socket that refuses descriptors a few times."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.failures = 3

    def sendmsg(self, data: Any, ancillary: Any, flags: int) -> int:
        if ancillary and self.failures:
            self.failures -= 1
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return self._inner.sendmsg(data, ancillary, flags)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0kvstore-test-{os.getpid()}")
        manager.settimeout(WAIT_S)
        yield manager


def test_what_the_keeper_confirms_it_has(manager: socket.socket) -> None:
    """A descriptor lost to ETOOMANYREFS counted as kept, and the memory behind it died with the daemon."""

    async def work() -> None:
        notifier = Notifier(f"@{manager.getsockname()[1:].decode()}")
        short: Any = ShortOnce(notifier._socket)  # type: ignore[arg-type]
        notifier._socket = short
        fd = os.memfd_create("test")
        storing = asyncio.create_task(notifier.store("dram-1", fd))
        received = []
        for _ in range(2):
            data, ancillary, _, _ = await asyncio.to_thread(manager.recvmsg, 256, socket.CMSG_SPACE(8))
            received.append((data.split(b"\n")[0], len(ancillary)))
            for _, _, payload in ancillary:
                os.close(int.from_bytes(payload[:4], "little"))
        await asyncio.wait_for(storing, WAIT_S)
        assert received == [(b"FDSTORE=1", 1), (b"BARRIER=1", 1)]
        assert not short.failures
        notifier.close()
        os.close(fd)

    asyncio.run(work())
