"""The daemon's end of a mover, with nobody at the other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.mover import link as module
from kvstore.mover.link import MoverLink
from kvstore.wire import mover as wire
from kvstore.wire.packed import MOVE, REPLY


class Rig:
    """A link, the mover's end of its socket, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        process: Any = SimpleNamespace(pid=1)
        self.link = MoverLink(process, ours, -1, max_outstanding=8)

    def say(self, message: wire.Message) -> None:
        wire.send_packet(self.theirs, wire.pack(message))
        self.link.receive()

    def stalled_at(self, now_s: float) -> float:
        self.now_s = now_s
        return self.link.stalled_s()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made: list[Rig] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made[0].now_s if made else 100.0))
    made.append(Rig())
    yield made[0]
    made[0].link.stop()
    made[0].theirs.close()


def test_a_mover_that_is_slow_to_start_is_no_disk_that_hangs(rig: Rig) -> None:
    """On a busy machine a mover took more than 3 s to start: its disk was out of use, and all on it a miss."""
    rig.link.send_moves(np.zeros(2, dtype=MOVE))
    assert rig.stalled_at(109.0) == 0.0
    rig.say(wire.Ready(threads=1))
    assert rig.stalled_at(111.0) == 2.0, "from now on it is the disk that is waited for"
    rig.say(wire.Replies(np.zeros(1, dtype=REPLY)))
    assert rig.stalled_at(115.0) == 4.0
    rig.say(wire.Replies(np.zeros(1, dtype=REPLY)))
    assert rig.stalled_at(200.0) == 0.0, "nothing is out"


def test_a_mover_that_never_starts_is_found_out_too(rig: Rig) -> None:
    rig.link.send_sync(1)
    assert rig.stalled_at(110.0) == 0.0
    assert rig.stalled_at(114.0) == 4.0


def test_time_in_which_nobody_watched_does_not_count(rig: Rig) -> None:
    """A daemon that had stood still itself, like its whole machine, took its disk for one that hangs."""
    rig.say(wire.Ready(threads=1))
    rig.link.send_moves(np.zeros(2, dtype=MOVE))
    rig.now_s = 104.0
    rig.link.not_watched(3.5)
    assert rig.link.stalled_s() == 0.5
    assert rig.stalled_at(108.0) == 4.5, "a disk that hangs shows all the same"
    rig.say(wire.Replies(np.zeros(1, dtype=REPLY)))
    rig.link.not_watched(3.5)
    assert rig.stalled_at(112.0) == 4.0, "what was answered since is not excused beforehand"
