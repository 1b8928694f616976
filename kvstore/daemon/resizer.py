"""Brings memory of a tier to its size while it is in use: what is too much is emptied and dropped, what lacks is added.

One task a resizable memory (DRAM, or one NVMe path). It works a turn at a time, so that everything else goes on, and
says what it waits for. A daemon that is killed meanwhile begins again from the size that was noted. Owner loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.errors import KvstoreError
from kvstore.layout import Tier
from kvstore.moves import ExtentInfo

__all__ = ["Resizable", "Resizer"]

_LOG = Log("resize")
_TURN_S = 0.02
_SLOW_TURN_S = 1.0
_SLOW_AFTER_TURNS = 150


class Resizable(Protocol):
    """What a resizer works on. Sizes are in the unit of `cost`."""

    tier: Tier
    device: int
    name: str
    """What people call it."""

    def cost(self, nbytes: int) -> int:
        """What an extent of `nbytes` takes of the size."""
        ...

    def room(self) -> int:
        """The size: what all extents together may take."""
        ...

    async def drop(self, info: ExtentInfo) -> None:
        """Takes an empty extent out. Raises KvstoreError, OSError where it has to wait: then it is asked again."""
        ...

    async def settle(self) -> None:
        """Nothing leaves any more: finishes what is left of that, then adds what there is room for.

        Raises KvstoreError, OSError as `drop` does.
        """
        ...


class Resizer:
    """The task of one resizable memory."""

    def __init__(self, owner: Owner, memory: Resizable) -> None:
        self._owner = owner
        self._memory = memory
        self._wanted = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self.waits_for = ""
        """What is in the way, in words; empty where nothing is."""

    @property
    def done(self) -> bool:
        """Whether the memory has its size."""
        return self._settled.is_set()

    @property
    def leaving(self) -> int:
        """Extents that are still to be emptied."""
        return len(self._owner.store.leaving(self._memory.tier, self._memory.device))

    def changed(self) -> None:
        """The size is another one, or may not hold."""
        self._settled.clear()
        self._wanted.set()

    async def settled(self, timeout_s: float) -> bool:
        """Whether the memory has its size within that time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        return self.done

    async def run_forever(self) -> None:
        """Works whenever the size has changed."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            turns, before = 0, ""
            while not await self._turn():
                turns = turns + 1 if self.waits_for == before else 0
                before = self.waits_for
                if slow := turns >= _SLOW_AFTER_TURNS:
                    self._complain()
                await asyncio.sleep(_SLOW_TURN_S if slow else _TURN_S)
            self._owner.warnings.pop(self._topic, None)
            if not self._wanted.is_set():
                self._settled.set()

    @property
    def _topic(self) -> str:
        return f"resize-{self._memory.tier.name.lower()}-{self._memory.device}"

    def _complain(self) -> None:
        """It has been in the way for some seconds."""
        if self.waits_for in self._owner.warnings.values():
            return  # it is said already
        text = f"{self._memory.name} has not got its size yet: {self.waits_for}"
        if self._owner.warnings.get(self._topic) != text:
            _LOG.warning("size not reached", memory=self._memory.name, waits=self.waits_for)
        self._owner.warnings[self._topic] = text

    async def _turn(self) -> bool:
        """Whether nothing is left to do."""
        store, memory = self._owner.store, self._memory
        infos = [info for info in store.extents(memory.tier) if info.device == memory.device]
        leaving = set(store.leaving(memory.tier, memory.device))
        staying = sum(memory.cost(info.nbytes) for info in infos if info.extent not in leaving)
        if (excess := staying - memory.room()) > 0:
            store.leave(memory.tier, memory.device, excess, memory.cost)
            leaving = set(store.leaving(memory.tier, memory.device))
        self.waits_for = ""
        try:
            for info in infos:
                if info.extent in leaving:
                    await self._empty(info)
            if self.leaving:
                return False
            await memory.settle()
        except (KvstoreError, OSError) as error:
            self.waits_for = str(error)
            return False
        finally:
            self._owner.settle_soon()
        _LOG.info("size reached", tier=memory.tier.name.lower(), device=memory.device)
        return True

    async def _empty(self, info: ExtentInfo) -> None:
        if reason := self._owner.store.empty_extent(info.extent):
            self.waits_for = reason
            return
        await self._memory.drop(info)
