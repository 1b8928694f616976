# ruff: noqa: N802 (names of cuda.bindings)
"""`cuda.bindings.driver` over host memory, as far as `tiers.hbm` calls it: answers in the same tuples, and keeps count.

Memory is a memfd; what the driver would refuse is refused here: a mapping over another or outside a reservation, access
to what is not mapped, calls without a current context. `fail` names calls that answer with an error.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

from tiers.memfd import create_memfd, map_memory, reserve, unmap

__all__ = ["GRANULARITY", "FakeCuda"]

GRANULARITY = 2 << 20


class CUresult(enum.IntEnum):
    """Of these, names are what counts."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


def _record() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace())


class FakeCuda(ModuleType):
    """Two GPUs of `memory_bytes` each."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__("fake cuda")
        self._lock = threading.RLock()
        self.CUresult = CUresult
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED="vmm"
        )
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
        self.CUmemAllocationGranularity_flags = SimpleNamespace(
            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended"
        )
        self.CUmemAllocationProp = _record
        self.CUmemAccessDesc = _record
        self.memory_bytes = memory_bytes
        self.fail: dict[str, CUresult] = {}
        self.calls: Counter[str] = Counter()
        self.contexts: list[str] = []
        self.retained = 0
        self.handles: dict[int, tuple[int, bool]] = {}  # handle → (memfd, exportable)
        self.mapped: dict[int, int] = {}  # address → bytes
        self.accessible: set[int] = set()
        self.reserved: dict[int, int] = {}
        self._next = 100

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(value):
            return value

        def call(*arguments: Any) -> tuple[Any, ...]:
            with self._lock:
                self.calls[name] += 1
                if name in self.fail:
                    return (self.fail[name], None)
                answer = value(*arguments)
            return (answer,) if isinstance(answer, CUresult) else (CUresult.CUDA_SUCCESS, *answer)

        return call

    # ------------------------------------------------------------ devices

    def cuInit(self, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS

    def cuDriverGetVersion(self) -> Any:
        return (13000,)

    def cuDeviceGetCount(self) -> Any:
        return (2,)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (ordinal,)

    def cuDeviceGetUuid(self, device: int) -> Any:
        return (SimpleNamespace(bytes=bytes([device + 1]) * 16),)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        assert attribute == "vmm"
        return (1,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.retained += 1
        return (f"context {device}",)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.retained -= 1
        return CUresult.CUDA_SUCCESS

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.contexts.append(context)
        return CUresult.CUDA_SUCCESS

    def cuCtxPopCurrent(self) -> Any:
        return (self.contexts.pop(),)

    def cuCtxSynchronize(self) -> Any:
        return CUresult.CUDA_SUCCESS if self.contexts else CUresult.CUDA_ERROR_INVALID_CONTEXT

    def cuMemGetInfo(self) -> Any:
        return (self.memory_bytes - self.used_bytes, self.memory_bytes)

    # ------------------------------------------------------------ memory

    @property
    def used_bytes(self) -> int:
        return sum(os.fstat(fd).st_size for fd, _ in self.handles.values())

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> Any:
        assert (properties.type, option) == ("pinned", "recommended")
        return (GRANULARITY,)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> Any:
        assert (properties.type, properties.location.type, flags) == ("pinned", "device", 0)
        if nbytes % GRANULARITY:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        if self.used_bytes + nbytes > self.memory_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        fd = create_memfd("fake-hbm", nbytes)
        return (self._handle(fd, getattr(properties, "requestedHandleTypes", None) == "fd"),)

    def cuMemRelease(self, handle: int) -> Any:
        os.close(self.handles.pop(handle)[0])
        return CUresult.CUDA_SUCCESS

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> Any:
        fd, exportable = self.handles[handle]
        assert (kind, flags) == ("fd", 0)
        return (os.dup(fd),) if exportable else CUresult.CUDA_ERROR_INVALID_VALUE

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> Any:
        assert kind == "fd"
        if not os.path.realpath(f"/proc/self/fd/{fd}").startswith("/memfd:fake-hbm"):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        return (self._handle(os.dup(fd), True),)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> Any:
        assert (alignment, address, flags) == (GRANULARITY, 0, 0)
        made = reserve(nbytes)
        self.reserved[made] = nbytes
        return (made,)

    def cuMemAddressFree(self, address: int, nbytes: int) -> Any:
        assert self.reserved.pop(address) == nbytes
        assert not self.mapped
        unmap(address, nbytes)
        return CUresult.CUDA_SUCCESS

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Any:
        assert (offset, flags) == (0, 0)
        if os.fstat(self.handles[handle][0]).st_size < nbytes:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        assert any(
            base <= address and address + nbytes <= base + size for base, size in self.reserved.items()
        )
        assert not any(at < address + nbytes and address < at + size for at, size in self.mapped.items())
        map_memory(self.handles[handle][0], nbytes, address)
        self.mapped[address] = nbytes
        return CUresult.CUDA_SUCCESS

    def cuMemUnmap(self, address: int, nbytes: int) -> Any:
        assert self.mapped.pop(address) == nbytes
        self.accessible.discard(address)
        reserve(nbytes, address)
        return CUresult.CUDA_SUCCESS

    def cuMemSetAccess(self, address: int, nbytes: int, descriptions: list[Any], count: int) -> Any:
        assert (self.mapped[address], count) == (nbytes, len(descriptions))
        assert descriptions[0].flags == "rw"
        assert descriptions[0].location.type == "device"
        self.accessible.add(address)
        return CUresult.CUDA_SUCCESS

    def cuMemcpyDtoH(self, host: int, address: int, nbytes: int) -> Any:
        assert self.contexts
        ctypes.memmove(host, address, nbytes)
        return CUresult.CUDA_SUCCESS

    def cuMemcpyHtoD(self, address: int, host: int, nbytes: int) -> Any:
        assert self.contexts
        ctypes.memmove(address, host, nbytes)
        return CUresult.CUDA_SUCCESS

    def _handle(self, fd: int, exportable: bool) -> int:
        self._next += 1
        self.handles[self._next] = (fd, exportable)
        return self._next
