"""What a scenario has asked the daemon for and waits for, with what was so when it asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvstore.daemon.write_down import Flushed
from tests.simulation.oracle import Key, Place

__all__ = ["Clear", "Flush", "Resize"]


@dataclass
class Flush:
    task: asyncio.Task[Flushed]
    wanted: set[Key]
    """What was in DRAM when it was asked for."""
    durable: dict[Key, Place] | None = None
    """What the store counted as written when the flush began to make it durable."""
    void: bool = False
    """A file that it may have counted on was deleted meanwhile."""


@dataclass
class Resize:
    task: asyncio.Task[bool]
    path: int | None
    """None: DRAM."""


@dataclass
class Clear:
    task: asyncio.Task[object]
    which: int | None
    sealed_since: set[Key]
    kept: set[Key] | None = None
    """What the store had once it had removed what nobody held."""
