"""What one measurement says of a disk by itself and of the same disk beside a computation."""

from __future__ import annotations

import pytest

from kvstore.layout import Tier
from kvstore.planning.speeds import SpeedMeter

MIB = 1 << 20


def test_a_disk_is_not_taken_for_slower_by_itself_than_beside_a_computation() -> None:
    """What one bad moment had said of a disk by itself stood, however fast its pieces came beside computations."""
    meter = SpeedMeter()
    meter.loaded(Tier.NVME, 4 * MIB, 3.6)
    for _ in range(6):
        meter.loaded_beside(MIB, 0.02)
    assert meter.speeds().tiers[Tier.NVME].seconds(4 * MIB) < 0.2


def test_a_disk_is_not_taken_for_faster_beside_a_computation_than_by_itself() -> None:
    """A disk that had become slow was read beside computations as if it were fast, until it was measured there, too."""
    meter = SpeedMeter()
    for _ in range(10):
        meter.loaded_beside(MIB, 0.02)
    for _ in range(4):
        meter.loaded(Tier.NVME, 4 * MIB, 2.0)
    beside = meter.speeds().beside
    assert beside is not None
    assert beside.seconds(4 * MIB) > 1.0


def test_a_disk_that_is_slower_beside_a_computation_keeps_both_speeds() -> None:
    meter = SpeedMeter()
    for _ in range(10):
        meter.loaded(Tier.NVME, 4 * MIB, 0.04)
        meter.loaded_beside(MIB, 0.05)
    speeds = meter.speeds()
    assert speeds.beside is not None
    assert speeds.tiers[Tier.NVME].seconds(4 * MIB) == pytest.approx(0.04, rel=0.01)
    assert speeds.beside.seconds(MIB) == pytest.approx(0.05, rel=0.01)
