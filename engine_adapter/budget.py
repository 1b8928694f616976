"""How much KV memory a worker takes: what its configuration says, or a share of what is free on its device."""

from __future__ import annotations

from pathlib import Path

from kvstore.client import DeviceSpec, connect
from kvstore.client.device import open_device
from kvstore.config import HbmBudget

__all__ = ["device_spec", "hbm_bytes"]


def device_spec(device: str, hbm_bytes: int) -> DeviceSpec:
    """The owned HBM of an engine on `device`: "cpu", which has a twin, or "cuda:N"."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return DeviceSpec(hbm_bytes=hbm_bytes, kind="cuda", index=int(number or 0))
    return DeviceSpec(hbm_bytes=hbm_bytes)


def hbm_bytes(budget: HbmBudget, device: str, socket: str | Path | None, *, timeout_s: float = 5.0) -> int:
    """The budget in bytes. What earlier workers left on the device counts as free: the worker takes it over.

    `socket` of the daemon, None where the engine runs without one. Raises: as opening the device and the daemon do.
    """
    if budget.size_bytes:
        return budget.size_bytes
    spec = device_spec(device, 0)
    opened = open_device(spec)
    try:
        free_bytes = opened.free_bytes()
    finally:
        opened.close()
    if socket is not None:
        with connect(socket, timeout_s=timeout_s) as client:
            devices = client.stats().devices
        free_bytes += sum(known.orphan_bytes for known in devices if known.index == spec.index)
    return budget.of(free_bytes)
