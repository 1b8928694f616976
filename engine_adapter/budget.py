"""How much KV memory a worker takes: what its configuration says, or a share of what is free on its device."""

from __future__ import annotations

from pathlib import Path

from kvstore.client import DeviceSpec, connect
from kvstore.client.device import open_device
from kvstore.config import HbmBudget
from kvstore.errors import ConfigError
from kvstore.units import format_size

__all__ = ["device_spec", "hbm_bytes"]


def device_spec(device: str, hbm_bytes: int) -> DeviceSpec:
    """The owned HBM of an engine on `device`: "cpu", which has a twin, or "cuda:N"."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return DeviceSpec(hbm_bytes=hbm_bytes, kind="cuda", index=int(number or 0))
    return DeviceSpec(hbm_bytes=hbm_bytes)


def hbm_bytes(
    budget: HbmBudget, device: str, socket: str | Path | None, *, shards: int = 1, timeout_s: float = 5.0
) -> int:
    """The budget in bytes. What earlier workers left on the device counts as free: the worker takes it over.

    `shards`: processes with a budget each, on a device each; but the twins of all of them are in one host's memory.
    `socket` of the daemon, None where the engine runs without one. Raises ConfigError for a size that the twin's host
    has not got; else as opening the device and the daemon do.
    """
    spec = device_spec(device, 0)
    if budget.size_bytes and spec.kind != "twin":
        return budget.size_bytes
    opened = open_device(spec)
    try:
        free_bytes = opened.free_bytes()
    finally:
        opened.close()
    twins = shards if spec.kind == "twin" else 1
    wanted_bytes = budget.size_bytes * twins
    if wanted_bytes and wanted_bytes <= free_bytes:
        return budget.size_bytes
    orphan_bytes, owned_bytes = _known_bytes(spec.index, socket, timeout_s)
    if not budget.size_bytes:
        return budget.of(free_bytes + orphan_bytes) // twins
    # Else it would take the machine's memory piece by piece, from everybody, until there is none: only then it fails.
    if wanted_bytes > free_bytes + owned_bytes:
        raise ConfigError(
            f"worker.hbm: {format_size(wanted_bytes)} of host memory for HBM's twin, of which "
            f"{format_size(free_bytes + owned_bytes)} is there: give less, or a share like 50%"
        )
    return budget.size_bytes


def _known_bytes(index: int, socket: str | Path | None, timeout_s: float) -> tuple[int, int]:
    """HBM of a device that the daemon keeps: (what no session maps, all of it)."""
    if socket is None:
        return 0, 0
    with connect(socket, timeout_s=timeout_s) as client:
        known = [device for device in client.stats().devices if device.index == index]
    return sum(device.orphan_bytes for device in known), sum(device.owned_bytes for device in known)
