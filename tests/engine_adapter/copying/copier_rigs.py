"""Copiers with memory on both of their sides: the twin, CUDA over a fake driver, and CUDA itself."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from engine_adapter.copying.cuda_copier import CudaCopier
from engine_adapter.copying.cuda_driver import Waiting
from engine_adapter.copying.device_sums import MakesSums
from engine_adapter.copying.kernel import KernelKind, KernelShape
from engine_adapter.copying.plan import Pieces
from engine_adapter.copying.portions import CopyLimits
from engine_adapter.copying.routes import DEFAULT_ROUTES, Lane, Route
from engine_adapter.copying.sum_kernel import MAX_SUMS, SumShape
from engine_adapter.copying.summed import checksums_at
from kvstore.errors import KvstoreError

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

SEEN_AT = 1 << 56
"""The fake device's name of a pinned address: that address and this."""
SMALL_LIMITS = CopyLimits(
    max_blocks=8,
    portion_bytes=256 << 10,
    portion_copies=3,
    flight_bytes=512 << 10,
    flight_portions=2,
    summed_from_bytes=4 << 10,
)
KERNEL = KernelShape(kind=KernelKind.THREADS, ctas=2)


def rows(blocks: U8) -> U64:
    """[n] addresses of the rows of an array `[n, nbytes]`."""
    return np.arange(len(blocks), dtype=np.uint64) * np.uint64(blocks.strides[0]) + np.uint64(
        blocks.ctypes.data
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks of one memory."""

    addresses: U64
    nbytes: int
    read: Callable[[], U8]
    """What they hold now, `[n, nbytes]`."""


class HostRig:
    """A copier both of whose sides are host memory."""

    def __init__(self, copier: TwinCopier | CudaCopier) -> None:
        self.copier = copier
        self._kept: list[U8] = []

    def device(self, blocks: U8) -> Blocks:
        """HBM that holds these."""
        memory = blocks.copy()
        self._kept.append(memory)
        return Blocks(addresses=rows(memory), nbytes=memory.shape[1], read=memory.copy)

    def host(self, blocks: U8) -> Blocks:
        """DRAM that holds these, pinned where the copier pins."""
        side = self.device(blocks)
        if isinstance(self.copier, CudaCopier):
            self.copier.register(int(side.addresses[0]), blocks.nbytes)
            self.copier.pin(side.addresses)
        return side


class GpuRig:
    """The CUDA copier on device 0."""

    def __init__(self, copier: CudaCopier) -> None:
        self.copier = copier
        self.driver = copier._driver
        self._device: list[int] = []
        self._host: list[U8] = []

    def device(self, blocks: U8) -> Blocks:
        base = self.driver.allocate(blocks.nbytes)
        self._device.append(base)
        with self.driver.current():
            self._copy(base, blocks.ctypes.data, blocks.nbytes)
        step = np.uint64(blocks.shape[1])
        return Blocks(
            addresses=np.arange(len(blocks), dtype=np.uint64) * step + np.uint64(base),
            nbytes=blocks.shape[1],
            read=lambda: self._read(base, blocks.shape),
        )

    def host(self, blocks: U8) -> Blocks:
        raw = np.zeros(blocks.nbytes + 2 * 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        memory = raw[start : start + blocks.nbytes].reshape(blocks.shape)
        memory[:] = blocks
        self._host.append(memory)
        self.copier.register(memory.ctypes.data, -(-memory.nbytes // 4096) * 4096)  # pages of nobody else
        self.copier.pin(rows(memory))
        return Blocks(addresses=rows(memory), nbytes=memory.shape[1], read=memory.copy)

    def free(self) -> None:
        for base in self._device:
            self.driver.free(base)
        for memory in self._host:
            self.copier.unregister(memory.ctypes.data)

    def _read(self, base: int, shape: tuple[int, ...]) -> U8:
        out = np.empty(shape, dtype=np.uint8)
        with self.driver.current():
            self._copy(out.ctypes.data, base, out.nbytes)
        return out

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = self.driver.create_stream(urgent=0.0)
        self.driver.copy(target, source, nbytes, stream)
        self.driver.synchronize_stream(stream)
        self.driver.destroy(streams=[stream], events=[])


Rig = HostRig | GpuRig


@contextmanager
def twin_rig() -> Iterator[HostRig]:
    copier = TwinCopier(max_blocks=8)
    try:
        yield HostRig(copier)
    finally:
        copier.close(10.0)


@contextmanager
def fake_rig(
    *,
    limits: CopyLimits = SMALL_LIMITS,
    small: Lane | None = None,
    beside: tuple[Lane, ...] = (),
    sums: MakesSums | None = None,
) -> Iterator[HostRig]:
    driver = FakeDriver()
    route = Route(small=(small or Lane(kernel=KERNEL),), beside=beside)
    copier = CudaCopier(
        0,
        limits=limits,
        routes=dict.fromkeys(Direction, route),
        driver=driver,
        kernel=FakeKernel,
        sums=sums or FakeSums,
    )
    try:
        yield HostRig(copier)
    finally:
        driver.open()
        copier.close(10.0)
        driver.end()


@contextmanager
def gpu_rig(
    *, limits: CopyLimits = SMALL_LIMITS, routes: dict[Direction, Route] | None = None
) -> Iterator[GpuRig]:
    copier = CudaCopier(0, limits=limits, routes=routes or DEFAULT_ROUTES)
    rig = GpuRig(copier)
    try:
        yield rig
    finally:
        copier.close(10.0)
        rig.free()


@dataclass(slots=True)
class _Stream:
    work: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def run(self) -> None:
        while (step := self.work.get()) is not None:
            step()


class FakeDriver:
    """`CudaDriver` over host memory: a stream is a thread. It refuses what the driver refuses, and can be held."""

    name = "a fake device"
    compute_capability = (9, 0)

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self._ids = itertools.count(1)
        self._memory: dict[int, U8] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, threading.Event] = {}
        self.pinned: dict[int, int] = {}
        self.batches: list[int] = []  # copies of each batch
        self.launches: list[int] = []  # pieces of each launch
        self.sums: list[int] = []  # blocks of each launch that takes checksums
        self.most_bytes_under_way = 0
        self._bytes_under_way = 0
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._go.set()
        self.broken = False

    def hold(self) -> None:
        """Copies wait from now on."""
        self._go.clear()

    def open(self) -> None:
        """They go on."""
        self._go.set()

    def end(self) -> None:
        for stream in self._streams.values():
            stream.work.put(None)

    def enter(self) -> None: ...

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int) -> int:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self._memory[address]

    def create_stream(self, *, urgent: float) -> int:
        number = next(self._ids)
        stream = self._streams[number] = _Stream()
        stream.thread = threading.Thread(target=stream.run, daemon=True)
        stream.thread.start()
        return number

    def create_event(self, waiting: Waiting = Waiting.SLEEP) -> int:
        number = next(self._ids)
        self._events[number] = threading.Event()
        return number

    def destroy(self, *, streams: list[int], events: list[int]) -> None:
        for event in events:
            assert self._events.pop(event).is_set(), "nothing of an event that goes is under way"
        for stream in streams:
            self._streams.pop(stream).work.put(None)

    def record(self, event: int, stream: int) -> None:
        recorded = self._events[event] = threading.Event()  # who waits already waits for the one before
        self._streams[stream].work.put(recorded.set)

    def wait(self, stream: int, event: int) -> None:
        recorded = self._events[event]
        self._streams[stream].work.put(lambda: recorded.wait(10) and None)

    def synchronize(self, event: int) -> None:
        assert self._events[event].wait(10)

    def synchronize_stream(self, stream: int) -> None:
        event = threading.Event()
        self._streams[stream].work.put(event.set)
        assert event.wait(10)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._put([target], [source], [nbytes], stream)

    def register(self, address: int, nbytes: int) -> int:
        self.pinned[address] = nbytes
        return address + SEEN_AT

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int, order: int) -> None:
        if self.broken:
            raise KvstoreError("cuMemcpyBatchAsync: CUDA_ERROR_ILLEGAL_ADDRESS: broken on purpose")
        for addresses in (targets, sources):
            for start in self.pinned:
                inside = (addresses < start) & (addresses + sizes > start)
                assert not inside.any(), "a copy may not reach into another pinned range"
        self.batches.append(len(sizes))
        self._put(targets.tolist(), sources.tolist(), sizes.tolist(), stream)

    def launch(self, pieces: Pieces, stream: int) -> None:
        self.launches.append(len(pieces))
        sources, targets = (
            [a - SEEN_AT if a >= SEEN_AT else a for a in side.tolist()]
            for side in (pieces.sources, pieces.targets)
        )
        for side in (pieces.sources, pieces.targets):
            for start, nbytes in self.pinned.items():
                inside = (side >= start) & (side < start + nbytes)
                assert not inside.any(), "kernels see pinned memory elsewhere"
        assert len(set(pieces.sizes.tolist())) == 1, "a kernel copies pieces of one size"
        self._put(targets, sources, pieces.sizes.tolist(), stream)

    def _put(self, targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        with self._lock:
            self._bytes_under_way += sum(sizes)
            self.most_bytes_under_way = max(self.most_bytes_under_way, self._bytes_under_way)

        def copy() -> None:
            self._go.wait(10)
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)
            with self._lock:
                self._bytes_under_way -= sum(sizes)

        self._streams[stream].work.put(copy)


class FakeKernel:
    """`CopyKernel` of the fake driver."""

    def __init__(self, driver: FakeDriver, shape: KernelShape) -> None:
        self._driver = driver

    def launch(self, pieces: Pieces, stream: int) -> None:
        self._driver.launch(pieces, stream)


class FakeSums:
    """`SumKernel` of the fake driver."""

    def __init__(self, driver: FakeDriver, shape: SumShape) -> None:
        self._driver = driver

    def launch(self, addresses: U64, nbytes: int, sums_at: int, stream: int) -> None:
        assert 0 < len(addresses) <= MAX_SUMS
        assert sums_at >= SEEN_AT, "kernels see pinned memory elsewhere"
        addresses = addresses.copy()

        def summed() -> None:
            sums = checksums_at(addresses, nbytes)
            ctypes.memmove(sums_at - SEEN_AT, sums.ctypes.data, sums.nbytes)

        self._driver.sums.append(len(addresses))
        self._driver._streams[stream].work.put(summed)


def batch_of(
    direction: Direction,
    sources: Blocks,
    targets: Blocks,
    done: Callable[[], None],
    *,
    after: int | None = None,
    sums: U64 | None = None,
) -> CopyBatch:
    """All blocks of `sources` into `targets`."""
    return CopyBatch(
        direction=direction,
        sources=sources.addresses,
        targets=targets.addresses,
        nbytes=sources.nbytes,
        done=done,
        after=after,
        sums=sums,
    )
