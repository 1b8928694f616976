"""Descriptors that stand for memory which only this process can reach.

Where memory cannot be exported, the service still needs a descriptor for each extent: it keeps a sealed memfd of one
page instead, which is shorter than the extent, and so is known for what it is by everybody who is given it.
"""

from __future__ import annotations

import os
from typing import Generic, TypeVar

from tiers.base import PAGE_BYTES
from tiers.memfd import create_memfd

__all__ = ["Placeholders"]

Memory = TypeVar("Memory")


class Placeholders(Generic[Memory]):
    """What each placeholder of this process stands for. Descriptors of one memfd, also copies of them, are one key."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], Memory] = {}

    def add(self, memory: Memory) -> int:
        """A new placeholder for `memory`; its descriptor is the caller's."""
        fd = create_memfd("kvstore-plain-hbm", PAGE_BYTES)
        self._memory[_key(fd)] = memory
        return fd

    def take(self, fd: int) -> Memory | None:
        """What `fd` stands for, which is the caller's from now on; None for any other descriptor. `fd` stays open."""
        return self._memory.pop(_key(fd), None)

    def take_all(self) -> list[Memory]:
        """Everything that nobody has taken."""
        left = list(self._memory.values())
        self._memory.clear()
        return left


def _key(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
