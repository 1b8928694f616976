"""Memory and copies for `bench copy`: on a CUDA device, or on host memory with the twin's copier where there is none.

Each direction has an area of its own on both sides, so that both can run at once. A raw copy is one call over the whole
area, the most that the machine gives; a loop is one call a block.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.copy_places import Places
from engine_adapter.copying.copier import Copier, Direction, TwinCopier
from engine_adapter.copying.cuda_copier import CudaCopier
from engine_adapter.copying.cuda_driver import CudaDriver, cuda_devices
from engine_adapter.copying.portions import CopyLimits
from engine_adapter.copying.routes import DEFAULT_ROUTES, Route
from kvstore.errors import ConfigError
from tiers.dram import DramTier

__all__ = ["HOST_NAME", "Area", "CopyBed", "CudaBed", "TwinBed", "open_bed"]

Side = Literal["source", "target"]

HOST_NAME = "host memory"
_SEED = 20_261
_DRAWN_WORDS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Where one direction copies from and to."""

    source: int
    target: int
    nbytes: int


class TwinBed:
    """Both sides are host memory."""

    def __init__(self, nbytes: int) -> None:
        self.name = HOST_NAME
        self._tier = DramTier()
        for extent in range(4):
            self._tier.create(extent, nbytes)
            self._tier.populate(extent)
        _draw(self._tier, 0)
        _draw(self._tier, 2)
        self.areas: Mapping[Direction, Area] = {
            direction: Area(
                source=self._tier.address(2 * direction),
                target=self._tier.address(2 * direction + 1),
                nbytes=nbytes,
            )
            for direction in Direction
        }

    def copier(
        self,
        routes: Mapping[Direction, Route] | None = None,
        limits: CopyLimits | None = None,  # noqa: ARG002 (CUDA's, as the routes)
    ) -> Copier:
        """A new one. Raises: ConfigError for routes, which are CUDA's."""
        if routes is not None:
            raise ConfigError("routes can be tried on a CUDA device only")
        return TwinCopier(max_blocks=1 << 20)

    def raw(self, directions: Sequence[Direction], nbytes: int) -> float:
        """One copy of the first bytes of each direction's area; when it ended, of time.perf_counter."""
        for direction in directions:
            area = self.areas[direction]
            ctypes.memmove(area.target, area.source, nbytes)
        return time.perf_counter()

    def loop(self, directions: Sequence[Direction], places: Places) -> float:
        """A call for each block; when they ended."""
        for direction in directions:
            area = self.areas[direction]
            for source, target in _pairs(places, direction):
                ctypes.memmove(area.target + target, area.source + source, places.nbytes)
        return time.perf_counter()

    def read(self, direction: Direction, side: Side, offset: int, nbytes: int) -> bytes:
        """Bytes of one side of an area."""
        area = self.areas[direction]
        return ctypes.string_at((area.source if side == "source" else area.target) + offset, nbytes)

    def close(self) -> None:
        """Gives the memory back."""
        self._tier.close()


class CudaBed:
    """Device memory and pinned DRAM extents."""

    def __init__(self, nbytes: int, device_index: int) -> None:
        self._driver = driver = CudaDriver(device_index)
        self._device_index = device_index
        driver.enter()
        self.name = driver.name
        self._nbytes = nbytes
        self._tier = DramTier()
        self._hbm = {direction: driver.allocate(nbytes) for direction in Direction}
        self._streams = {direction: driver.create_stream(urgent=0.0) for direction in Direction}
        for direction in Direction:
            self._tier.create(direction, nbytes)
            self._tier.populate(direction)
        self._dram = {direction: self._tier.address(direction) for direction in Direction}
        self.areas: Mapping[Direction, Area] = {
            Direction.LOAD: Area(
                source=self._dram[Direction.LOAD], target=self._hbm[Direction.LOAD], nbytes=nbytes
            ),
            Direction.STORE: Area(
                source=self._hbm[Direction.STORE], target=self._dram[Direction.STORE], nbytes=nbytes
            ),
        }
        self._copier: CudaCopier | None = None
        self._fill()

    def _fill(self) -> None:
        _draw(self._tier, Direction.LOAD)
        _draw(self._tier, Direction.STORE)
        driver, store = self._driver, self.areas[Direction.STORE]
        driver.copy(store.source, store.target, store.nbytes, self._streams[Direction.STORE])
        driver.synchronize_stream(self._streams[Direction.STORE])

    def copier(
        self, routes: Mapping[Direction, Route] | None = None, limits: CopyLimits | None = None
    ) -> Copier:
        """A new one, with the memory pinned by it; ends the one before."""
        self._end_copier()
        made = CudaCopier(self._device_index, routes=routes or DEFAULT_ROUTES, limits=limits)
        for address in self._dram.values():
            made.register(address, self._nbytes)
        made.pin(np.array(list(self._dram.values()), dtype=np.uint64))
        self._copier = made
        return made

    def raw(self, directions: Sequence[Direction], nbytes: int) -> float:
        """One copy of the first bytes of each direction's area, all at once; when it ended, of time.perf_counter."""
        driver = self._driver
        for direction in directions:
            area = self.areas[direction]
            driver.copy(area.target, area.source, nbytes, self._streams[direction])
        for direction in directions:
            driver.synchronize_stream(self._streams[direction])
        return time.perf_counter()

    def loop(self, directions: Sequence[Direction], places: Places) -> float:
        """A call for each block, the directions in turns; when they ended."""
        driver = self._driver
        ways = [
            (self.areas[direction], self._streams[direction], _pairs(places, direction))
            for direction in directions
        ]
        for pairs in zip(*(pairs for *_, pairs in ways), strict=True):
            for (source, target), (area, stream, _) in zip(pairs, ways, strict=True):
                driver.copy(area.target + target, area.source + source, places.nbytes, stream)
        for _, stream, _ in ways:
            driver.synchronize_stream(stream)
        return time.perf_counter()

    def read(self, direction: Direction, side: Side, offset: int, nbytes: int) -> bytes:
        """Bytes of one side of an area."""
        area = self.areas[direction]
        address = (area.source if side == "source" else area.target) + offset
        if (direction is Direction.LOAD) == (side == "source"):
            return ctypes.string_at(address, nbytes)
        held = ctypes.create_string_buffer(nbytes)
        self._driver.copy(ctypes.addressof(held), address, nbytes, self._streams[direction])
        self._driver.synchronize_stream(self._streams[direction])
        return held.raw

    def close(self) -> None:
        """Gives the memory back."""
        self._end_copier()
        for address in self._hbm.values():
            self._driver.free(address)
        self._driver.destroy(streams=list(self._streams.values()), events=[])
        self._tier.close()

    def _end_copier(self) -> None:
        if self._copier is not None:
            self._copier.close()
            for address in self._dram.values():
                self._copier.unregister(address)
        self._copier = None


CopyBed = CudaBed | TwinBed


@contextmanager
def open_bed(nbytes: int, *, device_index: int = 0) -> Iterator[CopyBed]:
    """Memory of `nbytes` a direction and side; the twin's where this host has no CUDA device."""
    bed: CopyBed = CudaBed(nbytes, device_index) if cuda_devices() else TwinBed(nbytes)
    try:
        yield bed
    finally:
        bed.close()


def _pairs(places: Places, direction: Direction) -> list[tuple[int, int]]:
    """(source, target) of each block."""
    return list(zip(places.sources(direction).tolist(), places.targets(direction).tolist(), strict=True))


def _draw(tier: DramTier, extent: int) -> None:
    """Bytes of which no two blocks are equal: a counter times an odd number, as fast as memory."""
    words = np.frombuffer(tier.view(extent), dtype=np.uint64)
    step = np.uint64(0x9E3779B97F4A7C15)
    pattern = np.arange(min(_DRAWN_WORDS, len(words)), dtype=np.uint64) * step + np.uint64(_SEED + extent)
    add = np.asarray([len(pattern)], dtype=np.uint64) * step  # an array: its overflow is meant
    for begin in range(0, len(words), len(pattern)):
        part = words[begin : begin + len(pattern)]
        part[:] = pattern[: len(part)]
        pattern += add
