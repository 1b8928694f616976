"""GPUs as NVML sees them: memory, health, topology; and what a fault of one means for the HBM on it.

NVML makes no CUDA context. Its calls can hang with the driver, so a thread of its own makes all of them, mostly asleep
in a bounded wait for events, and hands snapshots to the owner loop; a driver that hangs shows as a snapshot that grows
old. Without pynvml, or without a GPU, there are no snapshots and nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory
from kvstore.daemon.owner import Owner
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Devices", "GpuFault", "GpuHealth", "load_nvml"]

_LOG = Log("devices")
_WAIT_MS = 1000
_REFRESH_S = 5.0
# Of a killed or hung program, not of memory: every kill -9 of a busy worker may raise the first two.
_HARMLESS_XIDS = frozenset({43, 45, 68, 109})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU at one time."""

    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    memory_free_bytes: int
    ecc_uncorrected: int  # since the driver was loaded; 0 also where the GPU counts none
    pci_bus_id: str
    numa_node: int  # -1: not known
    links: tuple[int, ...]  # NVML's topology level to each GPU, itself 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """What NVML said of a GPU that makes its memory suspect."""

    uuid: str
    reason: str
    xid: int = 0


def load_nvml() -> ModuleType | None:
    """NVML, started; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _LOG.info("no nvml", error=error)
        return None
    module: ModuleType = pynvml
    return module


class Devices:
    """What the daemon knows of devices. Owner loop, with the exception of the thread's own methods."""

    def __init__(self, owner: Owner, memory: Memory, load: Callable[[], ModuleType | None]) -> None:
        """`load` gives NVML (`load_nvml`), or None; it is called on the thread."""
        self._owner = owner
        self._memory = memory
        self._load = load
        self._known: dict[int, tuple[int, str]] = {}  # device → (kind, uuid) of its newest session
        self._gpus: tuple[GpuHealth, ...] = ()
        self._read_s = 0.0
        self._xids: dict[str, list[int]] = {}  # by uuid, in order
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kvstore-nvml", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless the driver hangs: then it dies with the process."""
        self._stop.set()

    def attached(self, device: int, kind: int, uuid: str) -> None:
        """A session says what a device's number stands for."""
        self._known[device] = (kind, uuid)

    def device_stats(self) -> list[pb.DeviceStats]:
        """Devices that have extents or had sessions in this boot."""
        owned = self._memory.owned_bytes()
        stats = []
        for device in sorted(owned.keys() | self._known.keys()):
            kind, uuid = self._known.get(device, (pb.DEVICE_KIND_UNSPECIFIED, ""))
            message = pb.DeviceStats(index=device, kind=kind, uuid=uuid)  # type: ignore[arg-type]
            if device in owned:
                message.owned_bytes = owned[device].total_bytes
                message.orphan_bytes = owned[device].orphan_bytes
                message.plain_bytes = owned[device].plain_bytes
            stats.append(message)
        return stats

    def gpu_stats(self) -> list[pb.GpuStats]:
        """GPUs at the last look."""
        age_s = time.monotonic() - self._read_s
        return [
            pb.GpuStats(
                uuid=gpu.uuid,
                name=gpu.name,
                memory_total_bytes=gpu.memory_total_bytes,
                memory_used_bytes=gpu.memory_used_bytes,
                memory_free_bytes=gpu.memory_free_bytes,
                ecc_uncorrected=gpu.ecc_uncorrected,
                xid_events=len(self._xids.get(gpu.uuid, ())),
                last_xid=self._xids.get(gpu.uuid, [0])[-1],
                pci_bus_id=gpu.pci_bus_id,
                numa_node=gpu.numa_node,
                links=gpu.links,
                age_s=age_s,
            )
            for gpu in self._gpus
        ]

    # ------------------------------------------------------------ news, on the loop

    def looked(self, gpus: tuple[GpuHealth, ...]) -> None:
        """A new snapshot. An uncorrected ECC error that was not there at the last one is a fault."""
        before = {gpu.uuid: gpu.ecc_uncorrected for gpu in self._gpus}
        self._gpus, self._read_s = gpus, time.monotonic()
        for gpu in gpus:
            more = gpu.ecc_uncorrected - before.get(gpu.uuid, gpu.ecc_uncorrected)
            if more > 0:
                self.failed(
                    GpuFault(uuid=gpu.uuid, reason=f"{more} uncorrected ECC errors on GPU {gpu.uuid}")
                )

    def failed(self, fault: GpuFault) -> None:
        """An event of NVML."""
        if fault.xid:
            self._xids.setdefault(fault.uuid, []).append(fault.xid)
        if fault.xid in _HARMLESS_XIDS:
            _LOG.info("xid", gpu=fault.uuid, xid=fault.xid)
            return
        _LOG.warning("gpu fault", gpu=fault.uuid, reason=fault.reason)
        self._owner.warnings[f"gpu {fault.uuid}"] = fault.reason
        self._memory.distrust_devices(lambda device: self._may_be(device, fault.uuid), fault.reason)

    def _may_be(self, device: int, uuid: str) -> bool:
        """Whether a device's number stands for a GPU, or nobody has said what it stands for since the start.

        A group of processes names the GPUs of all of them, with commas between.
        """
        known = self._known.get(device, (pb.DEVICE_KIND_UNSPECIFIED, ""))[1]
        return not known or uuid in known.split(",")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        nvml = self._load()
        if nvml is None:
            return
        try:
            watch = _Watch(nvml)
            while not self._stop.is_set():
                self._tell(self.looked, watch.look())
                until_s = time.monotonic() + _REFRESH_S
                while time.monotonic() < until_s and not self._stop.is_set():
                    fault = watch.wait(_WAIT_MS)
                    if fault is not None:
                        self._tell(self.failed, fault)
            watch.close()
        except Exception as error:  # noqa: BLE001 (a thread's boundary: without news of GPUs the service goes on)
            self._tell(self._ended, error)

    def _ended(self, error: Exception) -> None:
        self._owner.counters.add("internal_errors_total")
        self._owner.warnings["nvml"] = f"GPUs are no longer watched: {error}"
        _LOG.warning("nvml ended", error=error)

    def _tell(self, call: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, argument)


class _Watch:
    """NVML's handles, for one thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
        self._links = [tuple(self._link(one, other) for other in range(count)) for one in range(count)]
        self._events = nvml.nvmlEventSetCreate() if count else None
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        self._registered = False
        for handle in self._handles:
            with contextlib.suppress(nvml.NVMLError):  # a GPU that offers no events
                offered = nvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted
                if offered:
                    nvml.nvmlDeviceRegisterEvents(handle, offered, self._events)
                    self._registered = True

    def look(self) -> tuple[GpuHealth, ...]:
        """All GPUs now; one that does not answer is left out."""
        return tuple(self._healths())

    def wait(self, timeout_ms: int) -> GpuFault | None:
        """The next event; None where none came in time."""
        nvml = self._nvml
        if not self._registered:
            time.sleep(timeout_ms / 1000)
            return None
        try:
            event = nvml.nvmlEventSetWait(self._events, timeout_ms)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                _LOG.warning("nvml events", error=error)
                time.sleep(timeout_ms / 1000)
            return None
        uuid = str(nvml.nvmlDeviceGetUUID(event.device))
        if event.eventType & nvml.nvmlEventTypeXidCriticalError:
            xid = int(event.eventData)
            return GpuFault(uuid=uuid, reason=f"Xid {xid} on GPU {uuid}", xid=xid)
        return GpuFault(uuid=uuid, reason=f"an uncorrected ECC error on GPU {uuid}")

    def close(self) -> None:
        """Lets go of NVML."""
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def _healths(self) -> Iterator[GpuHealth]:
        nvml = self._nvml
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                yield GpuHealth(
                    uuid=self._uuids[index],
                    name=str(nvml.nvmlDeviceGetName(handle)),
                    memory_total_bytes=int(memory.total),
                    memory_used_bytes=int(memory.used),
                    memory_free_bytes=int(memory.free),
                    ecc_uncorrected=self._or(0, "nvmlDeviceGetTotalEccErrors", handle, *self._ecc),
                    pci_bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
                    numa_node=self._or(-1, "nvmlDeviceGetNumaNodeId", handle),
                    links=self._links[index],
                )

    @property
    def _ecc(self) -> tuple[int, int]:
        return self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC

    def _link(self, one: int, other: int) -> int:
        if one == other:
            return 0
        handles = self._handles[one], self._handles[other]
        return self._or(0, "nvmlDeviceGetTopologyCommonAncestor", *handles)

    def _or(self, otherwise: int, function: str, *arguments: object) -> int:
        """What NVML answers, or `otherwise` where this GPU or driver has no answer."""
        try:
            return int(getattr(self._nvml, function)(*arguments))
        except (AttributeError, self._nvml.NVMLError):
            return otherwise


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
