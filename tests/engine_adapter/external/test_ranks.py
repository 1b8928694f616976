"""Ranks are told where to present themselves, and say whether they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine_adapter.external.ranks import RankGroup, RankListener
from engine_adapter.group.link import Join
from kvstore.errors import FailedPrecondition, Unavailable


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[Join], None]], str]]:
    """Makes a rank with this `join`; its name."""
    made: list[RankListener] = []

    def make(join: Callable[[Join], None]) -> str:
        made.append(RankListener(join, timeout_s=30.0))
        return made[-1].name

    yield make
    for one in made:
        one.close()


def test_every_rank_joins_and_again_when_the_session_is_renewed(
    listen: Callable[[Callable[[Join], None]], str],
) -> None:
    heard: list[tuple[int, str]] = []
    names = [listen(lambda said, rank=rank: heard.append((rank, said.token))) for rank in range(3)]  # type: ignore[misc]
    group = RankGroup(names, timeout_s=30.0)
    assert group.members == 4
    for token in (b"one", b"two"):
        group.join("/path", token, 4096, 0)
        group.wait_joined(0)
    assert sorted(heard) == sorted((rank, token.hex()) for rank in range(3) for token in (b"one", b"two"))


def test_a_rank_that_cannot_join_says_why(listen: Callable[[Callable[[Join], None]], str]) -> None:
    def refuse(_: Join) -> None:
        raise FailedPrecondition("no room\nhere")

    group = RankGroup([listen(lambda _: None), listen(refuse)], timeout_s=30.0)
    group.join("/path", b"token", 4096, 0)
    with pytest.raises(Unavailable, match="rank 1 of the engine cannot join: no room here"):
        group.wait_joined(0)


def test_a_rank_that_is_not_there_is_named(listen: Callable[[Callable[[Join], None]], str]) -> None:
    group = RankGroup([listen(lambda _: None), "kvstore-rank-nobody"], timeout_s=30.0)
    with pytest.raises(Unavailable, match="rank 1 of the engine is not on this machine"):
        group.join("/path", b"token", 4096, 0)
