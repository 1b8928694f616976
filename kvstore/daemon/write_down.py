"""A flush, and the drain at the daemon's end: writes down what is in DRAM alone, and says how far that came.

How long it waits is by what is known of the disks: as long as blocks get written, seconds for a disk that hangs or
fails all writes, and to the deadline for a path that may come into service. Owner loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.daemon.mover_path import MoverPath
from kvstore.daemon.owner import Owner
from kvstore.errors import FailedPrecondition
from kvstore.layout import Tier
from kvstore.tiering.health import RETRY_MS

__all__ = ["Flushed", "WriteDown"]

_FLUSH_POLL_S = 0.05
_NOTHING_FITS_S = 2.0  # with every disk well and idle; extents change class in less
_HUNG_PATIENCE_S = 2.0  # that a flush has for a disk that is known to hang, while no other takes anything
_PAUSED_PATIENCE_S = 2 * RETRY_MS / 1000  # and for one that fails all writes, which is tried meanwhile
_LOOK_S = 0.25
_DRAIN_PATIENCE_S = 1.0  # without a block written, while a path is out of service


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush has come to."""

    durable_blocks: int
    """On disk now, in all."""
    pending_blocks: int
    """Of those to be flushed: not on disk."""
    unfit_blocks: int = 0
    """Of the pending: storage has no place for them beside the others."""


class WriteDown:
    """One flush or drain over all paths."""

    def __init__(self, *, owner: Owner, paths: Mapping[int, MoverPath], failed: Callable[[], int]) -> None:
        """`paths`: those that are open, now or later; `failed`: blocks that disks have not taken, or given, so far."""
        self._owner = owner
        self._paths = paths
        self._failed = failed

    async def flush(self, deadline_s: float) -> Flushed:
        """Writes down what is in DRAM alone, as far as it fits.

        A path that is out of service may come back by the deadline, so it is waited for; one whose disk hangs or fails
        all writes has seconds.
        """
        return await self._run(deadline_s, patience_s=deadline_s)

    async def drain(self, deadline_s: float) -> Flushed:
        """As `flush`, for the daemon's end: a path that is out of service, or fails all that it writes, is given up."""
        return await self._run(deadline_s, patience_s=_DRAIN_PATIENCE_S)

    async def _run(self, deadline_s: float, *, patience_s: float) -> Flushed:
        if not self._owner.config.nvme:
            raise FailedPrecondition("nothing is durable: no NVMe path is configured")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        wanted = self._owner.store.flush()
        self._owner.settle_soon()
        left, moved_s, failed = len(wanted), loop.time(), self._failed()
        seen, idle_s = left, loop.time()
        full = False  # storage has no place for any of the rest
        while loop.time() < until_s and (
            (now := self._owner.store.left_of(wanted).coming) or not self._all_open
        ):
            if now < left:
                left, moved_s, failed = now, loop.time(), self._failed()
            elif self._all_answer and self._failed() == failed:  # slow is not away
                moved_s = loop.time()
            if now == seen and self._all_answer and all(path.idle for path in self._paths.values()):
                if full := loop.time() - idle_s >= _NOTHING_FITS_S:
                    break
            else:
                seen, idle_s = now, loop.time()
            if loop.time() - moved_s >= min(patience_s, self._patience_s()):
                break
            self._owner.settle_soon()
            await asyncio.sleep(min(_FLUSH_POLL_S, max(0.0, until_s - loop.time())))
        syncs = [asyncio.ensure_future(path.make_durable()) for path in self._paths.values()]
        if not self._all_answer:
            until_s = min(until_s, loop.time() + patience_s)
        done, late = await self._ended_by(until_s, syncs)
        rest = self._owner.store.left_of(wanted)
        left, unfit = rest.missing, rest.unfit + (rest.coming if full else 0)
        if late or not self._all_open or any(sync.exception() is not None for sync in done):
            left = max(1, left)  # which ones is not known: at least something is not certain
        return Flushed(durable_blocks=self._durable(), pending_blocks=left, unfit_blocks=min(left, unfit))

    async def _ended_by(
        self, until_s: float, syncs: Sequence[asyncio.Future[None]]
    ) -> tuple[set[asyncio.Future[None]], set[asyncio.Future[None]]]:
        """(those that have ended, those that have not) by then, or by the time that what is left hangs."""
        loop = asyncio.get_running_loop()
        done, late, well_s = set[asyncio.Future[None]](), set(syncs), loop.time()
        while late and (now_s := loop.time()) < until_s and now_s - well_s < self._patience_s():
            ended, late = await asyncio.wait(late, timeout=min(_LOOK_S, until_s - now_s))
            done |= ended
            if ended or self._all_answer:
                well_s = loop.time()
        for sync in late:  # it may fail yet, which is nobody's any more
            sync.add_done_callback(lambda sync: sync.cancelled() or sync.exception())
        return done, late

    def _patience_s(self) -> float:
        """How long a flush waits without anything that moves, by what is known of the disks."""
        if any(path.hangs for path in self._paths.values()):
            return _HUNG_PATIENCE_S
        if any(path.writes_paused for path in self._paths.values()):
            return _PAUSED_PATIENCE_S
        return math.inf

    @property
    def _all_open(self) -> bool:
        """Whether every configured path is in service: else what its index says is not known."""
        serving = sum(path.in_service for path in self._paths.values())
        return serving == len(self._owner.config.nvme)

    @property
    def _all_answer(self) -> bool:
        """Whether every configured path is in service and none hangs."""
        return self._all_open and all(path.answers for path in self._paths.values())

    def _durable(self) -> int:
        """Blocks that storage has."""
        return next(tier.sealed_slots for tier in self._owner.store.stats().tiers if tier.tier is Tier.NVME)
