"""The host memory that this process pins for one device: DRAM extents, as they come and go.

`register` and `unregister` are what a session calls when it maps and unmaps an extent. Pinning takes 0.05 s a GiB, for
which other threads' launches wait, and touching the memory before several times that: seconds for a whole tier, so
`register` only notes the range. `pin` pins the ranges of a copy before it is planned; the first one to do so, or
`pin_ahead`, also starts a thread that pins all the others. Not before: it would keep the loader of a starting engine
waiting, since pinning and mapping take turns on the address space; and a second later than asked, since then a first
request, which waited for that start, is being answered; and with rests while the engine computes. Readers see one
immutable snapshot, so they take no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.cuda_driver import CudaDriver
from kvstore.errors import KvstoreError
from kvstore.units import format_size

__all__ = ["PinnedHost"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")
_SETTLE_S = 1.0
_RESTS = 9
"""While the engine computes, the thread rests so many times as long as a range took: a tenth of the time is the most
that launches lose. H200, 44 GiB without rests: the first prompt of 8,192 tokens took 8 s instead of 0.2 s."""
_LOOK_S = 0.005
_GRACE_S = 5.0
"""One range is pinned within milliseconds; a driver that takes longer is broken."""


class _Pinning(Enum):
    """How far a range is."""

    WAITS = "waits"
    RUNS = "runs"
    PINNED = "pinned"
    REFUSED = "refused"


@dataclass(slots=True, kw_only=True, eq=False)
class _Range:
    """A mapped range. All but the first two fields change under the lock alone."""

    start: int
    nbytes: int
    pinning: _Pinning = _Pinning.WAITS
    seen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ranges:
    """[r] the known ranges, by address."""

    starts: U64
    ends: U64
    seen: U64  # where kernels see the range; 0: it is not pinned
    pending: NDArray[np.bool_]  # it waits, or is being pinned

    @classmethod
    def of(cls, ranges: list[_Range]) -> _Ranges:
        return cls(
            starts=np.array([known.start for known in ranges], dtype=np.uint64),
            ends=np.array([known.start + known.nbytes for known in ranges], dtype=np.uint64),
            seen=np.array([known.seen for known in ranges], dtype=np.uint64),
            pending=np.array(
                [known.pinning in (_Pinning.WAITS, _Pinning.RUNS) for known in ranges], dtype=np.bool_
            ),
        )

    def places(self, addresses: U64) -> NDArray[np.int64]:
        """[n] which range has each address, -1 for none."""
        if not len(self.starts):
            return np.full(len(addresses), -1, dtype=np.int64)
        place = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        outside = place < 0
        place[outside] = 0
        outside |= addresses >= self.ends[place]
        place[outside] = -1
        return place


class PinnedHost:
    """See the module. Any thread."""

    def __init__(self, driver: CudaDriver, *, settle_s: float = _SETTLE_S) -> None:
        """`settle_s`: how long `pin_ahead` leaves the memory as it is, unless a copy needs some."""
        self._driver = driver
        self._settle_s = settle_s
        self._changed = threading.Condition()
        self._known: dict[int, _Range] = {}
        self._ranges = _Ranges.of([])
        self._thread: threading.Thread | None = None
        self._hurried = False  # a copy has needed what was not pinned
        self._closed = False
        self.computing = False
        """Whether the engine computes; set by anybody."""

    def register(self, address: int, nbytes: int) -> None:
        """A range was mapped: it is to be pinned. Once closed it stays as it is."""
        with self._changed:
            pinning = _Pinning.REFUSED if self._closed else _Pinning.WAITS
            self._known[address] = _Range(start=address, nbytes=nbytes, pinning=pinning)
            self._publish()
            self._changed.notify_all()

    def unregister(self, address: int) -> None:
        """Unpins the range that begins at `address`, before it is unmapped. Waits where it is being pinned just now."""
        with self._changed:
            known = self._known.get(address)
            if known is None:
                return
            self._changed.wait_for(lambda: known.pinning is not _Pinning.RUNS)
            del self._known[address]
            self._publish()
        if known.pinning is _Pinning.PINNED:
            try:
                self._driver.unregister(address)
            except KvstoreError as error:  # a broken context: the process is about to end
                _LOG.warning("host memory at %#x was not unpinned: %s", address, error)

    def pending(self, addresses: U64) -> bool:
        """Whether `pin` would wait. O(n log r) while anything is to be pinned, else O(r)."""
        ranges = self._ranges
        if not ranges.pending.any():
            return False
        places = ranges.places(addresses)
        return bool(ranges.pending[places[places >= 0]].any())

    def pin(self, addresses: U64) -> None:
        """Returns when no range of these addresses is to be pinned any more; pins itself those that wait.

        Where the driver refuses, copies from and to the range go on, at the speed of pageable memory.
        """
        if not self.pending(addresses):
            return
        self.pin_ahead()
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
        ranges = self._ranges
        places = np.unique(ranges.places(addresses))
        for start in ranges.starts[places[places >= 0]].tolist():
            with self._changed:
                known = self._known.get(start)
            if known is not None:
                self._pin(known)

    def pin_ahead(self) -> None:
        """Has everything pinned soon, in the order in which it came, by a thread. Returns at once; idempotent."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._pin_all, name="kvstore-pin", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Pins nothing more: what waits stays as it is. Waits for what is being pinned just now. Idempotent."""
        with self._changed:
            self._closed = True
            for known in self._known.values():
                if known.pinning is _Pinning.WAITS:
                    known.pinning = _Pinning.REFUSED
            self._publish()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    @property
    def starts(self) -> U64:
        """[r] where ranges begin, pinned or not yet: no single copy may reach over one."""
        return self._ranges.starts

    def seen_by_kernels(self, addresses: U64) -> U64 | None:
        """[n] what kernels call these addresses; None where one is not pinned. O(n log r)."""
        ranges = self._ranges
        if not len(ranges.starts):
            return None
        places = ranges.places(addresses)
        if (places < 0).any() or not ranges.seen[places].all():
            return None
        seen: U64 = addresses - ranges.starts[places] + ranges.seen[places]
        return seen

    def _pin(self, known: _Range) -> None:
        """Pins a range that waits; returns when nobody pins it any more."""
        with self._changed:
            self._changed.wait_for(lambda: known.pinning is not _Pinning.RUNS)
            if known.pinning is not _Pinning.WAITS or self._known.get(known.start) is not known:
                return
            known.pinning = _Pinning.RUNS
        outcome = _Pinning.REFUSED
        try:
            known.seen = self._driver.register(known.start, known.nbytes)
            outcome = _Pinning.PINNED
        except KvstoreError as error:
            _LOG.warning(
                "%s of host memory cannot be pinned, copies will be slow: %s",
                format_size(known.nbytes),
                error,
            )
        finally:
            with self._changed:
                known.pinning = outcome
                self._publish()
                self._changed.notify_all()

    def _pin_all(self) -> None:
        """The thread, until `close`. Says how long everything that waited took."""
        with self._changed:
            self._changed.wait_for(lambda: self._hurried or self._closed, self._settle_s)
        began, count, nbytes = time.monotonic(), 0, 0
        while (known := self._next_waiting()) is not None:
            pinning_at = time.monotonic()
            self._pin(known)
            self._rest(_RESTS * (time.monotonic() - pinning_at))
            count, nbytes = count + 1, nbytes + known.nbytes
            if not self._ranges.pending.any():
                took_s = time.monotonic() - began
                _LOG.info("pinned ahead: %d extents, %s, %.3f s", count, format_size(nbytes), took_s)
                began, count, nbytes = time.monotonic(), 0, 0

    def _rest(self, most_s: float) -> None:
        """Leaves the driver to the engine, as long as that computes."""
        deadline = time.monotonic() + most_s
        with self._changed:
            while self.computing and not self._closed and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left_s, _LOOK_S))

    def _next_waiting(self) -> _Range | None:
        """The range that has waited longest, as soon as there is one; None once closed."""
        with self._changed:
            while not self._closed:
                for known in self._known.values():
                    if known.pinning is _Pinning.WAITS:
                        return known
                self._changed.wait()
        return None

    def _publish(self) -> None:
        """Under the lock: readers see what is known now."""
        self._ranges = _Ranges.of(sorted(self._known.values(), key=lambda known: known.start))
