"""What one measurement says of a disk by itself and of the same disk beside a computation."""

from __future__ import annotations

import pytest

from kvstore.layout import Tier
from kvstore.planning.speeds import SpeedMeter

MIB = 1 << 20


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


def test_pieces_that_do_not_come_in_time_count_too() -> None:
    """Only what came was measured: a slow disk whose first piece came at once was taken for a fast one for ever."""
    meter = SpeedMeter()
    for _ in range(8):
        meter.loaded_beside(MIB // 2, 0.1)
        meter.not_loaded_beside(MIB, 0.3)
        meter.not_loaded_beside(3 * MIB // 2, 0.3)
    beside = meter.speeds().beside
    assert beside is not None
    assert beside.seconds(4 * MIB) > 0.8
    meter.not_loaded_beside(3 * MIB // 2, 0.01)  # too soon to say anything
    assert meter.speeds().beside == beside


def test_both_ends_that_take_longer_than_expected_are_forgiven_after_a_while() -> None:
    meter = SpeedMeter()
    for _ in range(12):
        meter.both_took(0.16, 0.26)
    assert meter.speeds().both_factor == pytest.approx(0.26 / 0.16, rel=0.05)
    meter.both_took(0.16, 1000.0)  # one says no more than four times
    assert meter.speeds().both_factor < 2.5
    for _ in range(100):
        meter.other_way()
    assert 1.0 < meter.speeds().both_factor < 1.1
    for _ in range(20):
        meter.both_took(0.16, 0.1)
    assert meter.speeds().both_factor == pytest.approx(1.0, abs=0.01)


def test_pieces_of_one_size_do_not_make_a_disk_one_that_takes_no_time_for_bytes() -> None:
    """Where pieces came late at times all was put down to their start: both ends were to meet far too soon."""
    meter = SpeedMeter()
    for _ in range(8):
        meter.loaded(Tier.NVME, 512 * MIB, 0.4)
    for size, seconds in ((24, 0.09), (12, 0.09), (30, 0.08), (16, 0.1)) * 4:
        meter.loaded_beside(size * MIB, seconds)
    speeds = meter.speeds()
    assert speeds.behind is not None
    assert speeds.behind.seconds(512 * MIB) >= 0.4 / 1.5
