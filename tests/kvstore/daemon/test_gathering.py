"""Shards of a group's HBM: all of them enter the store together, or none does and none of their memory is kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.daemon.gathering import Gatherings
from kvstore.daemon.session import Session
from kvstore.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvstoreError,
    ResourceExhausted,
)
from kvstore.wire import descriptors as wire
from tiers.base import Sharing

PART = wire.NewHbm(nbytes=8192, slots=2, slot_bytes=4096)


class Memory:
    """Takes extents, or refuses them."""

    def __init__(self) -> None:
        self.entered: list[dict[str, Any]] = []
        self.refusal: KvstoreError | None = None

    async def add_hbm(self, session: Session, *, fds: Sequence[int], **how: Any) -> str:
        if self.refusal is not None:
            for fd in fds:
                os.close(fd)
            raise self.refusal
        self.entered.append({"fds": list(fds), **how})
        return "extent"


class Rig:
    def __init__(self, members: int = 3) -> None:
        self.memory = Memory()
        self.told: list[tuple[int, wire.Message]] = []
        self.gatherings = Gatherings(
            self.memory,  # type: ignore[arg-type]
            lambda _, member, message: self.told.append((member, message)),
        )
        self.session = Session(
            id=5,  # type: ignore[arg-type]
            digest=b"",
            name="group",
            device=0,
            slot_bytes=4096 * members,
            hbm_bytes=1 << 30,
            members=members,
        )
        self.session.all_here.set()
        self.fds: list[int] = []

    def give(self, member: int, part: Any = PART) -> asyncio.Task[Any]:
        self.fds.append(os.memfd_create("test"))
        return asyncio.create_task(self.gatherings.give(self.session, member, part, self.fds[-1]))

    def closed(self) -> bool:
        return not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in self.fds)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_last_shard_lets_all_of_them_in() -> None:
    rig = Rig()
    first = rig.give(0)
    await settle()
    asked = wire.Wanted(nbytes=8192, slots=2, slot_bytes=4096)
    assert rig.told == [(1, asked), (2, asked)]
    second = rig.give(2)
    await settle()
    assert rig.memory.entered == []
    third = rig.give(1)
    assert await asyncio.gather(first, second, third) == ["extent"] * 3
    (entered,) = rig.memory.entered
    assert entered["fds"] == [rig.fds[0], rig.fds[2], rig.fds[1]], "in the order of the members"
    assert (entered["slots"], entered["nbytes"]) == (2, 3 * 8192)
    assert entered["sharing"] is Sharing.DESCRIPTORS


async def test_nobody_is_asked_before_all_are_there() -> None:
    rig = Rig()
    rig.session.all_here.clear()
    first = rig.give(0)
    await settle()
    assert rig.told == []
    rig.session.all_here.set()
    await settle()
    assert len(rig.told) == 2
    first.cancel()


@pytest.mark.parametrize("member", [1, 2])
async def test_a_process_that_cannot_fails_all(member: int) -> None:
    rig = Rig()
    tasks = [rig.give(0)]
    await settle()
    tasks.append(rig.give(3 - member))
    await settle()
    rig.gatherings.fail(rig.session.id, member, "no memory is left")
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, FailedPrecondition)
        assert str(outcome) == f"process {member} of the group: no memory is left"
    assert rig.closed()
    assert rig.memory.entered == []


async def test_what_the_store_refuses_is_refused_to_all() -> None:
    rig = Rig()
    rig.memory.refusal = ResourceExhausted("too much")
    tasks = [rig.give(0)]
    await settle()
    tasks += [rig.give(1), rig.give(2)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ResourceExhausted] * 3
    assert rig.closed()


async def test_a_shard_that_nobody_asked_for_is_refused() -> None:
    rig = Rig()
    with pytest.raises(FailedPrecondition, match="process 0"):
        await rig.give(1)
    first = rig.give(0)
    await settle()
    with pytest.raises(FailedPrecondition, match="on its way"):
        await rig.give(0)
    with pytest.raises(InvalidArgument, match="nobody has asked"):
        await rig.give(1, wire.NewHbm(nbytes=4096, slots=1, slot_bytes=4096))
    with pytest.raises(InvalidArgument, match="nobody has asked"):
        await rig.give(1, wire.NewPlainHbm(nbytes=8192, slots=2, slot_bytes=4096))
    tasks = [rig.give(1)]
    await settle()
    with pytest.raises(InvalidArgument, match="nobody has asked"):
        await rig.give(1)
    assert await asyncio.gather(first, *tasks, rig.give(2)) == ["extent"] * 3


async def test_the_next_extent_follows_one_that_failed() -> None:
    rig = Rig(members=2)
    first = rig.give(0)
    await settle()
    rig.gatherings.fail(rig.session.id, 1, "not yet")
    with pytest.raises(FailedPrecondition):
        await first
    again = rig.give(0)
    await settle()
    assert await asyncio.gather(again, rig.give(1)) == ["extent"] * 2


async def test_a_process_that_never_came_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.daemon.gathering._PRESENT_S", 0.01)
    rig = Rig()
    rig.session.all_here.clear()
    with pytest.raises(FailedPrecondition, match="not all 3 processes"):
        await rig.give(0)
    assert rig.closed()


async def test_silence_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.daemon.gathering._TIMEOUT_S", 0.01)
    rig = Rig()
    with pytest.raises(DeadlineExceeded, match="gave no shard"):
        await rig.give(0)
    assert rig.closed()
