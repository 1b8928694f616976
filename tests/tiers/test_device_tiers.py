"""The contract of DeviceTier and Device, run by the twin and, where there is one, by a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.client import DeviceSpec
from kvstore.client.device import open_device
from kvstore.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from kvstore.units import MIB
from tests.support.device_process import pattern
from tests.support.device_rounds import bytes_outlive_their_maker, kill_and_attach, started
from tiers.base import Device, DeviceTier, Sharing

KINDS = ["twin", pytest.param("cuda", marks=pytest.mark.gpu)]
EXTENT = 4 * MIB


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(Sharing), ids=lambda sharing: sharing.value)
def device(request: pytest.FixtureRequest, kind: str) -> Iterator[Device]:
    opened = open_device(DeviceSpec(hbm_bytes=0, kind=kind, sharing=request.param))
    yield opened
    opened.close()


@pytest.fixture
def tier(device: Device) -> Iterator[DeviceTier]:
    made = device.reserve(8 * EXTENT)
    yield made
    made.close()


def add(tier: DeviceTier, extent: int, nbytes: int = EXTENT) -> int:
    """Makes and maps an extent; its address."""
    tier.adopt(extent, tier.new_extent(nbytes), nbytes)
    return tier.base + tier.offset(extent)


def test_what_is_written_is_read(tier: DeviceTier) -> None:
    first, second = add(tier, 5), add(tier, 2)
    assert (first, second) == (tier.base, tier.base + EXTENT)
    tier.write(first, pattern(1, EXTENT))
    tier.write(second, pattern(2, EXTENT))
    assert tier.read(first, EXTENT) == pattern(1, EXTENT)
    assert tier.read(second, EXTENT) == pattern(2, EXTENT)
    assert tier.extents() == {5: EXTENT, 2: EXTENT}


def test_extents_that_come_together_lie_in_their_order(tier: DeviceTier) -> None:
    made = [(extent, tier.new_extent(EXTENT), EXTENT) for extent in (7, 2, 9, 4)]
    tier.adopt_all(made)
    assert [tier.offset(extent) for extent, _, _ in made] == [place * EXTENT for place in range(4)]
    for extent in (7, 2, 9, 4):
        tier.write(tier.base + tier.offset(extent), pattern(extent, EXTENT))
    for extent in (7, 2, 9, 4):
        assert tier.read(tier.base + tier.offset(extent), EXTENT) == pattern(extent, EXTENT)


def test_a_mistake_among_several_closes_every_descriptor(tier: DeviceTier) -> None:
    add(tier, 1)
    made = [(extent, tier.new_extent(EXTENT), EXTENT) for extent in (2, 1, 3)]
    with pytest.raises(AlreadyExists):
        tier.adopt_all(made)
    for _, fd, _ in made:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_a_hole_is_used_again_and_the_range_has_an_end(tier: DeviceTier) -> None:
    for extent in range(8):
        add(tier, extent)
    fd = tier.new_extent(EXTENT)
    with pytest.raises(ResourceExhausted, match="no room"):
        tier.adopt(8, fd, EXTENT)
    tier.drop(3)
    with pytest.raises(NotFound):
        tier.offset(3)
    assert add(tier, 9) == tier.base + 3 * EXTENT


def test_mistakes_are_refused_and_descriptors_closed(tier: DeviceTier) -> None:
    add(tier, 1)
    fd = tier.new_extent(EXTENT)
    with pytest.raises(AlreadyExists):
        tier.adopt(1, fd, EXTENT)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    stranger = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(InvalidArgument):
        tier.adopt(2, stranger, EXTENT)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(stranger)
    with pytest.raises(InvalidArgument):
        tier.new_extent(EXTENT + 1)
    with pytest.raises(NotFound):
        tier.drop(2)
    assert tier.extents() == {1: EXTENT}


def test_memory_that_nobody_takes_goes(device: Device, tier: DeviceTier) -> None:
    fd = tier.new_extent(EXTENT)
    tier.discard(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_plain_memory_is_not_for_another_range(device: Device, tier: DeviceTier) -> None:
    """A descriptor that only stands for memory must not map somebody else's, or nothing at all."""
    fd = tier.new_extent(EXTENT)
    other = device.reserve(8 * EXTENT)
    if tier.sharing is Sharing.NONE:
        with pytest.raises(InvalidArgument):
            other.adopt(1, os.dup(fd), EXTENT)
        tier.adopt(1, fd, EXTENT)
    else:
        other.adopt(1, os.dup(fd), EXTENT)
        tier.adopt(1, fd, EXTENT)
        tier.write(tier.base, b"the same memory")
        assert other.read(other.base, 15) == b"the same memory"
    other.close()


def test_descriptors_do_not_leak(tier: DeviceTier) -> None:
    add(tier, 0)
    before = len(os.listdir("/proc/self/fd"))
    for extent in range(1, 20):
        add(tier, extent)
        tier.drop(extent)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_device_says_what_it_is(device: Device, kind: str) -> None:
    again = open_device(DeviceSpec(hbm_bytes=0, kind=kind))
    assert again.identity == device.identity
    assert device.identity.startswith(kind)
    assert device.uuid or kind == "twin"
    assert EXTENT % device.granularity_bytes == 0
    assert device.free_bytes() > EXTENT
    again.close()


def test_bytes_outlive_their_maker(kind: str) -> None:
    bytes_outlive_their_maker(kind, 32 * MIB)


def test_each_process_finds_what_the_one_before_it_wrote(kind: str) -> None:
    with started(kind) as (maker,):
        fd = maker.make(extent=0, nbytes=32 * MIB)
        for at in (0, 31 * MIB):
            maker.ask("fill", extent=0, seed=0, nbytes=MIB, at=at)
    kill_and_attach(kind, fd, rounds=3, nbytes=32 * MIB, side_by_side=3)
    os.close(fd)
