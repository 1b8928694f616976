"""The daemon's side of a mover, for its tests: everything has a deadline."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.mover.link import MoverLink
from kvstore.wire import mover as wire

__all__ = ["DEADLINE_S", "Start", "held_at", "statuses", "wait_dead", "wait_for"]

Start = Callable[..., MoverLink]
DEADLINE_S = 30.0


def wait_for(link: MoverLink, kind: type, count: int = 1) -> list[wire.Message]:
    """All messages until `count` of `kind` have come (replies count their records), or the mover ended."""
    messages: list[wire.Message] = []
    deadline = time.monotonic() + DEADLINE_S
    seen = 0
    while seen < count and not link.ended:
        left = deadline - time.monotonic()
        assert left > 0, f"no {kind.__name__} in {DEADLINE_S} s; got {messages}"
        select.select([link], [link] if link.wants_write else [], [], left)
        link.flush()
        for message in link.receive():
            messages.append(message)
            if isinstance(message, kind):
                seen += len(message.replies) if isinstance(message, wire.Replies) else 1
    return messages


def statuses(messages: list[wire.Message]) -> dict[int, int]:
    """Status by move id."""
    found: dict[int, int] = {}
    for message in messages:
        if isinstance(message, wire.Replies):
            found |= dict(
                zip(message.replies["id"].tolist(), message.replies["status"].tolist(), strict=True)
            )
    return found


def wait_dead(link: MoverLink) -> int:
    """Exit code, once the pidfd has fired."""
    assert select.select([link.pidfd], [], [], DEADLINE_S)[0], "the mover did not end"
    code = link.reap(DEADLINE_S)
    assert code is not None
    return code


@contextmanager
def held_at(gate: Path, begin: Callable[[], object]) -> Iterator[None]:
    """In the block the next operation of a disk, which `begin` asks for, has begun and does not go on.

    `gate` is the mover's file of disk faults, which was not there so far: a pipe that nobody writes is waited for by
    whoever reads it.
    """
    os.mkfifo(gate)
    begin()
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            writer = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: nobody reads it
            assert time.monotonic() < deadline, "no operation of the disk has begun"
            time.sleep(0.002)
        else:
            break
    try:
        yield
    finally:
        gate.unlink()
        os.close(writer)
