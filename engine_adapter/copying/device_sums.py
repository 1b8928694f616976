"""Checksums of blocks on their way between HBM and DRAM: taken in HBM, behind what a copier has issued.

Of a store the blocks are summed where they come from, beside the copies; of a load where they have arrived, so what is
compared is what the engine will read. One stream of its own: its kernels read HBM alone, and write 16 bytes a block to
pinned memory. One way's; the issuing thread puts work in, the finishing thread takes results out.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.copying.cuda_driver import CudaDriver
from engine_adapter.copying.sum_kernel import KIB, MAX_SUMS, SumKernel, SumShape
from engine_adapter.copying.summed import checksums_at
from kvstore.errors import KvstoreError

__all__ = ["DeviceSums", "MakesSums", "Summing", "Sums", "TakesSums"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")
_SUM_BYTES = 16
_SHAPES = {Direction.LOAD: SumShape(ctas=16), Direction.STORE: SumShape(ctas=4)}
"""A request waits for the end of a load; a store is beside an engine that computes, and has to keep up with the link
alone. By what a CTA should do (see SumShape), not by what was measured."""
_TRIED_BYTES = 132 * KIB


class TakesSums(Protocol):
    """A compiled kernel (`SumKernel`)."""

    def launch(self, addresses: U64, nbytes: int, sums_at: int, stream: int) -> None:
        """See SumKernel."""
        ...


MakesSums = Callable[[CudaDriver, SumShape], TakesSums]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """Checksums under way, behind an event of the portion that they came with."""

    blocks: range
    """Of the batch."""
    place: int


class DeviceSums:
    """Of one direction: see the module."""

    def __init__(
        self,
        driver: CudaDriver,
        direction: Direction,
        *,
        places: int,
        most_blocks: int,
        kernel: MakesSums = SumKernel,
    ) -> None:
        """Compiles and tries. Room for `places` portions under way of `most_blocks` each.

        Raises: MissingExtra, KvstoreError, also where the device's checksums are not the processor's.
        """
        self._driver = driver
        self._direction = direction
        self._most_blocks = most_blocks
        self._kernel = kernel(driver, _SHAPES[direction])
        nbytes = -(-places * most_blocks * _SUM_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, nbytes)
        self._sums = np.frombuffer(self._memory, dtype=np.uint64)
        self._seen = driver.register(self._sums.ctypes.data, nbytes)
        self._stream = driver.create_stream(urgent=1.0 if direction is Direction.LOAD else 0.0)
        self._lock = threading.Lock()
        self._free = list(range(places))
        if not self._agrees():
            self.close()
            raise KvstoreError(
                "the checksum kernel of this device computes other checksums than the processor"
            )

    def follow(self, event: int) -> None:
        """What is summed from now on comes after the event: of a load's copies, or of what a batch waits for."""
        self._driver.wait(self._stream, event)

    def start(self, batch: CopyBatch, blocks: range) -> tuple[Summing, int]:
        """Has these blocks of a batch summed: what `collect` wants, and the stream that an event is to be behind."""
        with self._lock:
            place = self._free.pop()
        addresses = batch.targets if self._direction is Direction.LOAD else batch.sources
        at = self._seen + place * self._most_blocks * _SUM_BYTES
        for begin in range(blocks.start, blocks.stop, MAX_SUMS):
            end = min(begin + MAX_SUMS, blocks.stop)
            self._kernel.launch(
                addresses[begin:end], batch.nbytes, at + (begin - blocks.start) * _SUM_BYTES, self._stream
            )
        return Summing(blocks=blocks, place=place), self._stream

    def collect(self, batch: CopyBatch, summing: Summing) -> None:
        """The event has come: the batch gets its checksums."""
        assert batch.sums is not None
        begin, count = summing.place * self._most_blocks, len(summing.blocks)
        words = self._sums[2 * begin : 2 * (begin + count)]
        batch.sums[summing.blocks.start : summing.blocks.stop] = words.reshape(-1, 2)
        with self._lock:
            self._free.append(summing.place)

    def _agrees(self) -> bool:
        """Whether some blocks of a few tiles have their checksums: wrong ones would have sound blocks thrown away."""
        blocks = np.random.default_rng(0).integers(0, 256, size=(2, _TRIED_BYTES), dtype=np.uint8)
        device = self._driver.allocate(blocks.nbytes)
        starts = np.arange(2, dtype=np.uint64) * np.uint64(_TRIED_BYTES)
        try:
            with self._driver.current():
                self._driver.copy(device, blocks.ctypes.data, blocks.nbytes, self._stream)
                self._kernel.launch(starts + np.uint64(device), _TRIED_BYTES, self._seen, self._stream)
                self._driver.synchronize_stream(self._stream)
        finally:
            self._driver.free(device)
        expected = checksums_at(starts + np.uint64(blocks.ctypes.data), _TRIED_BYTES)
        return bool((self._sums[:4].reshape(-1, 2) == expected).all())

    def close(self) -> None:
        """Gives stream and memory back; nothing is under way."""
        self._driver.destroy(streams=[self._stream], events=[])
        self._driver.unregister(self._sums.ctypes.data)


class Sums:
    """Whether and how the batches of one direction are summed. A device that cannot does not, and the log says so."""

    def __init__(self, made: DeviceSums | None, from_bytes: int) -> None:
        self._made = made
        self._from_bytes = from_bytes

    @classmethod
    def opened(
        cls,
        driver: CudaDriver,
        direction: Direction,
        *,
        places: int,
        most_blocks: int,
        from_bytes: int,
        kernel: MakesSums,
    ) -> Sums:
        """Those of a direction, of blocks of at least `from_bytes`."""
        made = None
        try:
            made = DeviceSums(driver, direction, places=places, most_blocks=most_blocks, kernel=kernel)
        except KvstoreError as error:
            _LOG.warning("checksums are taken by the movers: %s", error)
        return cls(made, from_bytes)

    def take(self, nbytes: int) -> bool:
        """Whether blocks of this size are summed where that is asked for."""
        return self._made is not None and nbytes >= self._from_bytes and nbytes % KIB == 0

    def of(self, batch: CopyBatch) -> DeviceSums | None:
        """Who sums this batch; None where nobody is to."""
        wanted = batch.sums is not None and len(batch.sources) and self.take(batch.nbytes)
        return self._made if wanted else None

    def close(self) -> None:
        """As of DeviceSums. Again: nothing."""
        made, self._made = self._made, None
        if made is not None:
            made.close()
