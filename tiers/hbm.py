"""A GPU's HBM: CUDA virtual memory in one reserved address range, exported as descriptors that outlive this process.

An extent is one physical allocation (cuMemCreate). Whoever has its descriptor keeps the memory alive, with no CUDA
context; whoever imports it maps the same bytes. The device's primary context is used, which torch and cupy share, and
only for the length of each call: the caller's own current context is never changed. The bindings are imported when a
device is opened: everything else works without them.
"""

from __future__ import annotations

import contextlib
import os
import uuid as uuids
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np

from kvstore.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    KvstoreError,
    MissingExtra,
    NotFound,
    ResourceExhausted,
)
from kvstore.units import GIB, format_size
from tiers.base import DeviceTier, Sharing
from tiers.gaps import first_gap
from tiers.placeholders import Placeholders
from tiers.twin import boot_id

__all__ = ["CudaDevice", "CudaError", "HbmTier"]

_MAP_THREADS = 4
"""Extents mapped at once: one takes 137 ms a GiB, nearly all of it inside the driver. 1: one after the other."""
_STICKY = frozenset(
    {
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_TENSOR_LEAKAGE_FROM_GPU",
    }
)


class CudaError(KvstoreError):
    """A call of the driver failed."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name

    @property
    def sticky(self) -> bool:
        """Whether every later call of this process fails too: only a new process gets further."""
        return self.name in _STICKY


class CudaDevice:
    """Device that is a GPU. Opening it retains the primary context (some hundred MiB of HBM, once a process)."""

    kind = "cuda"
    extent_bytes = GIB

    def __init__(
        self,
        *,
        index: int = 0,
        uuid: str = "",
        sharing: Sharing = Sharing.DESCRIPTORS,
        driver: ModuleType | None = None,
    ) -> None:
        """The GPU with this `uuid`, else the one that CUDA gives this ordinal. `driver` stands in for the bindings.

        `sharing` NONE makes plain memory also where descriptors would do. Raises MissingExtra without the bindings,
        FailedPrecondition without a driver or without virtual memory management, NotFound for a GPU that is not there.
        """
        self._driver = driver or _load_driver()
        try:
            self.call("cuInit", 0)
        except Exception as error:
            raise FailedPrecondition(f"no CUDA device can be used: {error}") from error
        self.ordinal = self._find(index, uuid)
        self._handle = self.call("cuDeviceGet", self.ordinal)
        self.uuid = self._uuid_of(self.ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._handle)
        try:
            attribute = self._driver.CUdevice_attribute
            managed = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
            if not self.call("cuDeviceGetAttribute", managed, self._handle):
                raise FailedPrecondition(
                    f"GPU {self.uuid} has no virtual memory management: it cannot own HBM"
                )
            self.granularity_bytes = self._granularity()
            self.why_plain = "asked for" if sharing is Sharing.NONE else self._try_export()
        except BaseException:
            self.close()
            raise
        self.sharing = Sharing.NONE if self.why_plain else Sharing.DESCRIPTORS

    @property
    def identity(self) -> str:
        """See Device."""
        return f"cuda {self.uuid} {boot_id()} {self.call('cuDriverGetVersion')}"

    def free_bytes(self) -> int:
        """See Device."""
        with self.current():
            free, _total = self.call("cuMemGetInfo")
        return int(free)

    def reserve(self, capacity_bytes: int) -> DeviceTier:
        """See Device."""
        return HbmTier(self, capacity_bytes)

    def close(self) -> None:
        """See Device. A context with a sticky error is left to the end of the process."""
        if self._context is not None:
            self._context = None
            with contextlib.suppress(CudaError):
                self.call("cuDevicePrimaryCtxRelease", self._handle)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The primary context is this thread's for the length of the block."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: object) -> Any:
        """A function of the driver API: its one result, a tuple of several, None without any.

        Raises ResourceExhausted where memory is short, else CudaError.
        """
        result, *values = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            error = _name(self._driver, result)
            if error == "CUDA_ERROR_OUT_OF_MEMORY":
                raise ResourceExhausted(f"{name}: the GPU is out of memory")
            raise CudaError(name, error)
        if len(values) > 1:
            return tuple(values)
        return values[0] if values else None

    def create(self, nbytes: int) -> Any:
        """Physical memory of this device; the caller releases the handle."""
        return self.call("cuMemCreate", nbytes, self._properties(self.sharing), 0)

    def export(self, handle: Any) -> int:
        """A descriptor of an allocation; the caller's."""
        fd = int(self.call("cuMemExportToShareableHandle", handle, self._handle_type, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_(self, fd: int) -> Any:
        """The allocation behind a descriptor, which stays the caller's; so is the handle. Raises InvalidArgument."""
        try:
            return self.call("cuMemImportFromShareableHandle", fd, self._handle_type)
        except CudaError as error:
            raise InvalidArgument(f"the descriptor of an extent is no memory of this GPU: {error}") from error

    def access(self) -> Any:
        """Read and write by this device."""
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    @property
    def _handle_type(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, sharing: Sharing) -> Any:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        if sharing is Sharing.DESCRIPTORS:
            properties.requestedHandleTypes = self._handle_type
        return properties

    def _granularity(self) -> int:
        option = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.call("cuMemGetAllocationGranularity", self._properties(Sharing.NONE), option))

    def _try_export(self) -> str:
        """Why memory cannot be exported here; empty where it can: some containers and virtual GPUs refuse it."""
        try:
            properties = self._properties(Sharing.DESCRIPTORS)
            handle = self.call("cuMemCreate", self.granularity_bytes, properties, 0)
            try:
                os.close(self.export(handle))
            finally:
                self.call("cuMemRelease", handle)
        except CudaError as error:
            return str(error)
        return ""

    def _find(self, index: int, uuid: str) -> int:
        count = int(self.call("cuDeviceGetCount"))
        if not uuid:
            if not 0 <= index < count:
                raise NotFound(f"there is no GPU {index}: CUDA shows {count}")
            return index
        for ordinal in range(count):
            if self._uuid_of(ordinal) == uuid:
                return ordinal
        raise NotFound(f"there is no GPU {uuid} among the {count} that CUDA shows")

    def _uuid_of(self, ordinal: int) -> str:
        raw = self.call("cuDeviceGetUuid", self.call("cuDeviceGet", ordinal))
        return f"GPU-{uuids.UUID(bytes=bytes(raw.bytes)[:16])}"


class HbmTier:
    """DeviceTier of one GPU."""

    def __init__(self, device: CudaDevice, capacity_bytes: int, *, map_threads: int = _MAP_THREADS) -> None:
        """Reserves addresses. Raises ResourceExhausted."""
        self._map_threads = map_threads
        granularity = device.granularity_bytes
        self._device = device
        self.capacity_bytes = -(-capacity_bytes // granularity) * granularity
        with device.current():
            self._base = int(device.call("cuMemAddressReserve", self.capacity_bytes, granularity, 0, 0))
        self._places: dict[int, tuple[int, int]] = {}  # extent → [begin, end) in the range
        self._plain: Placeholders[Any] = Placeholders()  # to handles of allocations

    @property
    def device(self) -> str:
        """See DeviceTier."""
        return f"cuda:{self._device.ordinal}"

    @property
    def sharing(self) -> Sharing:
        """See DeviceTier."""
        return self._device.sharing

    @property
    def base(self) -> int:
        """See DeviceTier."""
        return self._base

    def new_extent(self, nbytes: int) -> int:
        """See DeviceTier."""
        granularity = self._device.granularity_bytes
        if nbytes <= 0 or nbytes % granularity:
            raise InvalidArgument(
                f"an extent is a positive multiple of {format_size(granularity)}, not {nbytes}"
            )
        with self._device.current():
            handle = self._device.create(nbytes)
            if self.sharing is Sharing.NONE:
                return self._plain.add(handle)
            try:
                return self._device.export(handle)
            finally:  # the descriptor keeps the memory
                self._device.call("cuMemRelease", handle)

    def discard(self, fd: int) -> None:
        """See DeviceTier."""
        handle = self._plain.take(fd)
        os.close(fd)
        if handle is not None:
            with self._device.current():
                self._device.call("cuMemRelease", handle)

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        """See DeviceTier."""
        try:
            begin = self._place(extent, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._import(extent, fd, begin, nbytes)

    def adopt_all(self, extents: Sequence[tuple[int, int, int]]) -> None:
        """See DeviceTier."""
        placed: list[int] = []
        try:
            for extent, _, nbytes in extents:
                placed.append(self._place(extent, nbytes))
        except BaseException:
            for extent, _, _ in extents[: len(placed)]:
                del self._places[extent]
            for _, fd, _ in extents:
                self.discard(fd)
            raise
        with ThreadPoolExecutor(self._map_threads, thread_name_prefix="kvstore-hbm") as threads:
            tasks = [
                threads.submit(self._import, extent, fd, begin, nbytes)
                for (extent, fd, nbytes), begin in zip(extents, placed, strict=True)
            ]
        for task in tasks:  # all have ended
            task.result()

    def offset(self, extent: int) -> int:
        """See DeviceTier."""
        if extent not in self._places:
            raise NotFound(f"hbm extent {extent} is not mapped")
        return self._places[extent][0]

    def extents(self) -> dict[int, int]:
        """See DeviceTier."""
        return {extent: end - begin for extent, (begin, end) in self._places.items()}

    def read(self, address: int, nbytes: int) -> bytes:
        """See DeviceTier."""
        host = np.empty(nbytes, dtype=np.uint8)
        with self._device.current():
            self._device.call("cuMemcpyDtoH", host.ctypes.data, address, nbytes)
        return host.tobytes()

    def write(self, address: int, data: bytes) -> None:
        """See DeviceTier."""
        host = np.frombuffer(data, dtype=np.uint8)
        with self._device.current():
            self._device.call("cuMemcpyHtoD", address, host.ctypes.data, len(data))
            # From pageable memory the call returns once the bytes are staged: the copy itself may still run.
            self._device.call("cuCtxSynchronize")

    def drop(self, extent: int) -> None:
        """See DeviceTier. Waits for the work of this process on the device: what is unmapped must not be in use."""
        begin = self.offset(extent)
        nbytes = self._places[extent][1] - begin
        with self._device.current():
            with contextlib.suppress(CudaError):  # a broken context has nothing left to wait for
                self._device.call("cuCtxSynchronize")
            self._device.call("cuMemUnmap", self._base + begin, nbytes)
        del self._places[extent]

    def close(self) -> None:
        """See DeviceTier. After a sticky error nothing can be unmapped: the end of the process does it."""
        with contextlib.suppress(CudaError), self._device.current():
            for extent in tuple(self._places):
                self.drop(extent)
            for handle in self._plain.take_all():
                self._device.call("cuMemRelease", handle)
            if self._base:
                self._device.call("cuMemAddressFree", self._base, self.capacity_bytes)
        self._base = 0

    def _place(self, extent: int, nbytes: int) -> int:
        """Takes the first gap for an extent; where it begins."""
        if extent in self._places:
            raise AlreadyExists(f"hbm extent {extent} is mapped already")
        granularity = self._device.granularity_bytes
        if nbytes <= 0 or nbytes % granularity:
            raise InvalidArgument(f"an extent of {nbytes} bytes is no multiple of {format_size(granularity)}")
        begin = first_gap(self._places.values(), nbytes, self.capacity_bytes)
        self._places[extent] = (begin, begin + nbytes)
        return begin

    def _import(self, extent: int, fd: int, begin: int, nbytes: int) -> None:
        """Maps an extent at its place, which is free again where that fails. Any thread. `fd` is closed."""
        try:
            with self._device.current():
                handle = self._plain.take(fd)
                if handle is None:
                    handle = self._device.import_(fd)
                try:
                    self._map(handle, self._base + begin, nbytes)
                finally:  # the mapping keeps the memory
                    self._device.call("cuMemRelease", handle)
        except BaseException:
            del self._places[extent]
            raise
        finally:
            os.close(fd)

    def _map(self, handle: Any, address: int, nbytes: int) -> None:
        try:
            self._device.call("cuMemMap", address, nbytes, 0, handle, 0)
        except CudaError as error:
            raise InvalidArgument(
                f"the descriptor of an extent has no {format_size(nbytes)} of this GPU: {error}"
            ) from error
        try:
            self._device.call("cuMemSetAccess", address, nbytes, [self._device.access()], 1)
        except BaseException:
            self._device.call("cuMemUnmap", address, nbytes)
            raise


def _load_driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingExtra(
            "a GPU needs the CUDA bindings: install kvstore[cuda] (cuda-bindings, cupy-cuda13x)"
        ) from None
    module: ModuleType = driver
    return module


def _name(driver: ModuleType, result: Any) -> str:
    """`CUDA_ERROR_…` of a failed call."""
    return str(getattr(result, "name", None) or driver.CUresult(result).name)
