"""The part of the CUDA driver that copies need, called through ctypes: no list of Python objects for each batch.

Every call releases the GIL while it runs. A thread calls `enter` once before it issues or waits; `register`, `allocate`
and their opposites may be called from any thread, which keeps the context it had. The context is the device's primary
one, so torch and every other user of the process share it. Handles are plain integers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FailedPrecondition, KvstoreError, ResourceExhausted
from tiers.memfd import populate

__all__ = ["CudaDriver", "SourceOrder", "Waiting", "cuda_devices"]

U64 = NDArray[np.uint64]

_OUT_OF_MEMORY = 2
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_REGISTER_PORTABLE, _REGISTER_DEVICEMAP = 1, 2


class SourceOrder(IntEnum):
    """When a batch may read its sources: after the work before it in its stream, or at any time."""

    STREAM = 1
    ANY = 3


class Waiting(IntEnum):
    """How `synchronize` waits for an event. Neither holds the GIL."""

    SPIN = 0
    """On a core of its own: microseconds after the event."""
    SLEEP = 1
    """Some tens of microseconds later."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


# By the symbols that libcuda exports (cuda.h of CUDA 13.0). cuMemcpyBatchAsync without suffix is the form of CUDA 12.8,
# which says which copy was wrong; newer drivers keep it.
_PROTOTYPES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuMemcpyBatchAsync": (*(c_void_p,) * 3, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
}


@functools.cache
def _library() -> ctypes.CDLL:
    """libcuda, with its prototypes. Raises: FailedPrecondition where this host has no NVIDIA driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise FailedPrecondition("this host has no NVIDIA driver (libcuda.so.1)") from None
    for name, arguments in _PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = arguments, c_int
    return library


def cuda_devices() -> int:
    """CUDA devices of this host; 0 where there is no driver, or it sees none. Makes no context."""
    count = c_int()
    try:
        library = _library()
    except FailedPrecondition:
        return 0
    if library.cuInit(0) or library.cuDeviceGetCount(byref(count)):
        return 0
    return count.value


class CudaDriver:
    """One device's primary context. Raises of every method: ResourceExhausted for memory, KvstoreError for the rest."""

    def __init__(self, device_index: int) -> None:
        """Raises: FailedPrecondition where there is no driver or no such device."""
        self._cuda = _library()
        self.device_index = device_index
        try:
            self._call("cuInit", 0)
            device = c_int()
            self._call("cuDeviceGet", byref(device), device_index)
        except KvstoreError as error:
            raise FailedPrecondition(f"no CUDA device {device_index}: {error}") from None
        self._device = device.value
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self.has_batches = hasattr(self._cuda, "cuMemcpyBatchAsync")

    def close(self) -> None:
        """Gives the context up; the last user of it ends it."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def enter(self) -> None:
        """Makes the context current in this thread, for good."""
        self._call("cuCtxSetCurrent", self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context is current inside; afterwards what was before."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    @property
    def name(self) -> str:
        """Of the device, with the newest CUDA version that its driver knows."""
        name, version = ctypes.create_string_buffer(128), c_int()
        self._call("cuDeviceGetName", name, len(name), self._device)
        self._call("cuDriverGetVersion", byref(version))
        return f"{name.value.decode()}, CUDA {version.value // 1000}.{version.value % 1000 // 10}"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self._attribute(_COMPUTE_CAPABILITY_MAJOR), self._attribute(_COMPUTE_CAPABILITY_MINOR)

    # ------------------------------------------------------------ streams and events

    def create_stream(self, *, urgent: float) -> int:
        """A stream of its own. `urgent`: 0 for the lowest priority, 1 for the highest."""
        with self.current():
            least, greatest = c_int(), c_int()
            self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
            priority = round(least.value + urgent * (greatest.value - least.value))
            stream = c_void_p()
            self._call("cuStreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, priority)
        return stream.value or 0

    def create_event(self, waiting: Waiting = Waiting.SLEEP) -> int:
        """An event, without a time."""
        with self.current():
            event = c_void_p()
            self._call("cuEventCreate", byref(event), waiting * _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy(self, *, streams: list[int], events: list[int]) -> None:
        """Ends streams and events that have nothing under way."""
        with self.current():
            for stream in streams:
                self._call("cuStreamDestroy_v2", stream)
            for event in events:
                self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """The event comes after what is in the stream now."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What is put into the stream from now on comes after the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize(self, event: int) -> None:
        """Waits until the event has come, in the way that it was created with."""
        self._call("cuEventSynchronize", event)

    def synchronize_stream(self, stream: int) -> None:
        """Waits until the stream is empty."""
        self._call("cuStreamSynchronize", stream)

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        """Device memory; its address."""
        with self.current():
            address = c_uint64()
            self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Device memory of `allocate`."""
        with self.current():
            self._call("cuMemFree_v2", address)

    def register(self, address: int, nbytes: int) -> int:
        """Pins host memory for copies and for kernels; where kernels see it. About 0.05 s a GiB.

        It is faulted in before: the driver would do that under a lock that every launch of the process waits for.
        """
        populate(address, nbytes)
        with self.current():
            self._call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE | _REGISTER_DEVICEMAP)
            seen = c_uint64()
            self._call("cuMemHostGetDevicePointer_v2", byref(seen), address, 0)
        return seen.value

    def unregister(self, address: int) -> None:
        """Unpins."""
        with self.current():
            self._call("cuMemHostUnregister", address)

    # ------------------------------------------------------------ copies and kernels

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One copy, either way."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int, order: SourceOrder) -> None:
        """[n] copies by the copy engines, in any order among themselves. The arrays are read before it returns."""
        count = len(sizes)
        if not self.has_batches:
            for target, source, nbytes in zip(
                targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
            ):
                self._call("cuMemcpyAsync", target, source, nbytes, stream)
            return
        attributes, first, failed = _Attributes(source_order=order), c_size_t(0), c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            _pointer(targets),
            _pointer(sources),
            _pointer(sizes),
            count,
            byref(attributes),
            byref(first),
            1,
            byref(failed),
            stream,
        )

    def launch(
        self, function: int, *, ctas: int, threads: int, shared_bytes: int, stream: int, argument: bytes
    ) -> None:
        """Starts a kernel of one parameter, passed by value: `argument`, which may be reused at once."""
        pointers = (c_void_p * 1)(ctypes.cast(c_char_p(argument), c_void_p))
        self._call(
            "cuLaunchKernel", function, ctas, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None
        )

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            kind = ResourceExhausted if code == _OUT_OF_MEMORY else KvstoreError
            raise kind(
                f"{name}: {self._text('cuGetErrorName', code)}: {self._text('cuGetErrorString', code)}"
            )

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        getattr(self._cuda, name)(code, byref(text))
        return (text.value or b"unknown").decode()


def _pointer(values: U64) -> int:
    assert values.dtype == np.uint64, "addresses and sizes are 64-bit"
    assert values.flags.c_contiguous, "the driver reads arrays without strides"
    return values.ctypes.data
