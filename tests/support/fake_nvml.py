# ruff: noqa: N802, N816 (names of pynvml)
"""A pynvml that a test puts on a daemon's path: two GPUs whose state and events are in files of its own folder.

`state.json` has the ECC count of each GPU and whether the library fails; `events` has one line an event, taken in turn.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_GPU_IS_LOST = 15
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeDoubleBitEccError = 2
nvmlEventTypeXidCriticalError = 8

_FOLDER = Path(__file__).parent
_UUIDS = ("GPU-a", "GPU-b")
_seen = 0


class NVMLError(Exception):
    """As pynvml's."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def _state() -> dict[str, Any]:
    state: dict[str, Any] = json.loads((_FOLDER / "state.json").read_text())
    return state


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_UUIDS)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return _UUIDS[handle]


def nvmlDeviceGetName(handle: int) -> str:
    return f"Fake {handle}"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    if _state().get("lost") == handle:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return SimpleNamespace(total=100 << 30, used=30 << 30, free=70 << 30)


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    if handle == 1:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    assert (kind, counter) == (1, 0)
    return int(_state()["ecc"])


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode())


def nvmlDeviceGetTopologyCommonAncestor(one: int, other: int) -> int:
    assert one != other
    return 30


def nvmlEventSetCreate() -> str:
    return "set"


def nvmlEventSetFree(events: str) -> None:
    assert events == "set"


def nvmlDeviceGetSupportedEventTypes(handle: int) -> int:
    return 0x1F


def nvmlDeviceRegisterEvents(handle: int, types: int, events: str) -> None:
    assert (types, events) == (10, "set")


def nvmlEventSetWait(events: str, timeout_ms: int) -> SimpleNamespace:
    global _seen
    assert timeout_ms > 0
    lines = (_FOLDER / "events").read_text().splitlines()
    if len(lines) == _seen:
        time.sleep(0.02)
        raise NVMLError(NVML_ERROR_TIMEOUT)
    handle, kind, data = (int(word) for word in lines[_seen].split())
    _seen += 1
    if kind < 0:
        raise RuntimeError("a library that broke")
    return SimpleNamespace(device=handle, eventType=kind, eventData=data)
