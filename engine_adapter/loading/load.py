"""Copies from DRAM to HBM for one request, from the grant that named the slots to their end.

Made and used on the engine's thread; `loaded` is set by the copier's. What comes is compared with its checksum, where
the session does that: a load of which a block differs is `wrong`, the daemon is told which, and who asks again finds it
gone.
"""

from __future__ import annotations

import functools
import logging
import time

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier, CopyBatch, Direction
from engine_adapter.loading.arrival import Arrival
from kvstore.client import Session, SlotRun, copied, differing
from kvstore.errors import Unavailable

__all__ = ["Load"]

_LOG = logging.getLogger("kvstore.loading")


class Load:
    """Blocks on their way up. It has references of its own to the HBM slots, and takes over those to the DRAM slots."""

    __slots__ = (
        "_batch",
        "_expected",
        "_session",
        "_sources",
        "_sums",
        "_targets",
        "arriving",
        "began_at",
        "ended_at",
        "failed",
        "loaded",
        "wrong",
    )

    def __init__(self, session: Session, sources: SlotRun, targets: SlotRun) -> None:
        self._session = session
        self._sources = sources
        self._targets = targets
        self._expected = session.checksums_of(sources.slots)
        self._sums: NDArray[np.uint64] | None = None
        if self._expected.any():
            self._sums = np.zeros_like(self._expected)
        self._batch: CopyBatch | None = None
        self.arriving: Arrival | None = None  # where it comes in groups of layers, from its submission on
        self.loaded = False
        self.wrong = False  # some of it is not what was stored: none of it is to be used
        self.failed = False  # it will never be: its copier has failed, and what that had stays held
        self.began_at = self.ended_at = time.monotonic()
        session.share_hbm(targets.slots)

    def __len__(self) -> int:
        """Blocks."""
        return len(self._sources)

    @property
    def begun(self) -> bool:
        """Whether a copier has taken it."""
        return self._batch is not None

    @property
    def nbytes(self) -> int:
        """Of all its blocks."""
        return len(self._sources) * self._session.hbm.slot_bytes

    @property
    def seconds(self) -> float:
        """From its making to its end. Once it is `loaded`."""
        return self.ended_at - self.began_at

    def submit(self, copier: Copier, arrival: Arrival | None = None) -> None:
        """Has it begin, unless it has begun or failed; the copier may be full: then ask again.

        `arrival`: it comes in groups of layers, and that hears of them.
        """
        if self._batch is None:
            batch = CopyBatch(
                direction=Direction.LOAD,
                sources=self._session.dram.address_of(self._sources.slots),
                targets=self._session.hbm.address_of(self._targets.slots),
                nbytes=self._session.hbm.slot_bytes,
                done=self._done,
                failed=functools.partial(self._fail, arrival),
                hbm_slots=self._targets.slots,
                dram_slots=self._sources.slots,
                sums=self._sums,
                groups=1 if arrival is None else arrival.groups,
                group_done=None if arrival is None else functools.partial(self._came, arrival),
            )
            try:
                taken = copier.submit(batch)
            except Unavailable:
                self.failed = True
                return
            if taken:
                self._batch, self.arriving = batch, arrival

    def withdraw(self, copier: Copier) -> None:
        """Nobody needs it: it is taken back where nothing of it has begun."""
        if self._batch is None or copier.cancel(self._batch):
            self._session.stage(dropped_hbm=self._targets.slots, dropped_dram=self._sources.slots)

    def _fail(self, arrival: Arrival | None) -> None:
        self.failed = True
        if arrival is not None:
            arrival.fail()
        self._session.notify()

    def _came(self, arrival: Arrival, group: int) -> None:
        if group == arrival.groups - 1 and self._differs().any():
            arrival.reject()  # its step has begun with the groups before
        else:
            arrival.came(group)

    def _differs(self) -> NDArray[np.bool_]:
        """[n] blocks that are not what was stored."""
        if self._sums is None:
            return np.zeros(len(self), dtype=np.bool_)
        return differing(self._sums, self._expected)

    def _done(self) -> None:
        self.ended_at = time.monotonic()
        differs = self._differs()
        self.wrong = bool(differs.any())
        if self.wrong:
            _LOG.warning(
                "%d of %d blocks that were loaded are not what was stored: they are computed again",
                int(differs.sum()),
                len(self),
            )
        self._session.step(
            loads=copied(self._sources, self._targets, differs=differs),
            dropped_hbm=self._targets.slots,
            dropped_dram=self._sources.slots,
        )
        self.loaded = True
        self._session.notify()
