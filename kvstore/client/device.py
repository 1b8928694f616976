"""The device whose HBM a session owns: what a caller asks for, and how it is opened."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from kvstore.errors import InvalidArgument, ResourceExhausted
from kvstore.units import format_size
from kvstore.wire.v1 import kvstore_pb2 as pb
from tiers.base import Device, Sharing
from tiers.twin import TwinDevice

__all__ = ["DeviceSpec", "device_message", "hbm_slots", "open_device", "slots_per_extent"]

_LOG = logging.getLogger("kvstore.client")
_KINDS = {"twin": pb.DEVICE_KIND_TWIN, "cuda": pb.DEVICE_KIND_CUDA}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The owned HBM of a session. `hbm_bytes` is its budget on that device, in bytes.

    `index` is the device's number in the service, and the ordinal that CUDA gives it unless `uuid` names another GPU:
    a process that sees only some of the machine's GPUs gives both. `kind` is "twin" or "cuda".
    """

    hbm_bytes: int
    index: int = 0
    kind: str = "twin"
    uuid: str = ""
    sharing: Sharing = Sharing.DESCRIPTORS


def open_device(spec: DeviceSpec) -> Device:
    """Opens the device of a session.

    Raises: InvalidArgument for an unknown kind; MissingExtra, FailedPrecondition and NotFound as `tiers.hbm` does.
    """
    if spec.kind == "twin":
        return TwinDevice(spec.sharing)
    if spec.kind != "cuda":
        raise InvalidArgument(f"a device is a 'twin' or 'cuda', not {spec.kind!r}")
    from tiers.hbm import CudaDevice  # loads the driver: only for those who own a GPU

    device = CudaDevice(index=spec.index, uuid=spec.uuid, sharing=spec.sharing)
    if device.why_plain:
        _LOG.warning(
            "HBM of GPU %s cannot be exported, its blocks end with this process: %s",
            device.uuid,
            device.why_plain,
        )
    return device


def device_message(spec: DeviceSpec | None, device: Device | None) -> pb.Device | None:
    """The device on the wire."""
    if spec is None or device is None:
        return None
    return pb.Device(kind=_KINDS[device.kind], index=spec.index, uuid=device.uuid, identity=device.identity)


def slots_per_extent(device: Device, slot_bytes: int) -> tuple[int, int]:
    """(slots of a good extent, slots of which an extent is a multiple)."""
    unit_bytes = math.lcm(slot_bytes, device.granularity_bytes)
    unit = unit_bytes // slot_bytes
    return max(1, device.extent_bytes // unit_bytes) * unit, unit


def hbm_slots(device: Device, slot_bytes: int, hbm_bytes: int) -> int:
    """Slots that a budget gives, up to a whole number of the smallest extents.

    Raises: ResourceExhausted where it is less than a slot.
    """
    slots = hbm_bytes // slot_bytes
    if not slots:
        raise ResourceExhausted(
            f"{format_size(hbm_bytes)} of HBM is less than a slot of {format_size(slot_bytes)}"
        )
    _, unit = slots_per_extent(device, slot_bytes)
    return -(-slots // unit) * unit
