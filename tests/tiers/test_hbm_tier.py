"""HbmTier over a fake driver: what is called, what is given back on every way out, and what a failure becomes.

The same contract over a real GPU: `test_device_tiers`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from kvstore.client.device import hbm_slots, slots_per_extent
from kvstore.errors import FailedPrecondition, InvalidArgument, MissingExtra, NotFound, ResourceExhausted
from kvstore.units import GIB, MIB
from tests.support.fake_cuda import GRANULARITY, CUresult, FakeCuda
from tiers.base import DeviceTier, Sharing
from tiers.hbm import CudaDevice, CudaError, HbmTier
from tiers.twin import TwinDevice

EXTENT = 2 * GRANULARITY


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """At the end of each test the driver has everything back."""
    fake = FakeCuda()
    gc.collect()  # what earlier tests left to it closes descriptors
    before = len(os.listdir("/proc/self/fd"))
    yield fake
    assert (fake.handles, fake.mapped, fake.reserved) == ({}, {}, {})
    assert (fake.contexts, fake.retained) == ([], 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(params=list(Sharing), ids=lambda sharing: sharing.value)
def device(cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    opened = CudaDevice(driver=cuda, sharing=request.param)
    yield opened
    opened.close()


@pytest.fixture
def tier(device: CudaDevice) -> Iterator[DeviceTier]:
    made = device.reserve(4 * EXTENT)
    yield made
    made.close()


def test_extents_are_memory_in_one_range(cuda: FakeCuda, device: CudaDevice, tier: DeviceTier) -> None:
    for extent in (3, 1):
        tier.adopt(extent, tier.new_extent(EXTENT), EXTENT)
    assert not cuda.handles, "a mapping keeps its memory by itself"
    assert cuda.mapped == {tier.base: EXTENT, tier.base + EXTENT: EXTENT}
    assert cuda.accessible == set(cuda.mapped)
    tier.write(tier.base + EXTENT, b"block")
    assert tier.read(tier.base + EXTENT, 5) == b"block"
    tier.drop(3)
    assert cuda.calls["cuCtxSynchronize"] >= 1, "nothing is unmapped under a kernel"
    assert tier.extents() == {1: EXTENT}


def test_new_memory_is_kept_by_its_descriptor_alone(cuda: FakeCuda) -> None:
    device = CudaDevice(driver=cuda)
    tier = device.reserve(EXTENT)
    fd = tier.new_extent(EXTENT)
    assert not cuda.handles
    assert not os.get_inheritable(fd)
    tier.discard(fd)
    tier.close()
    device.close()


def test_plain_memory_that_nobody_took_goes_with_the_tier(cuda: FakeCuda) -> None:
    device = CudaDevice(driver=cuda, sharing=Sharing.NONE)
    tier = device.reserve(4 * EXTENT)
    left, taken = tier.new_extent(EXTENT), tier.new_extent(EXTENT)
    tier.adopt(1, taken, EXTENT)
    tier.discard(tier.new_extent(EXTENT))
    assert len(cuda.handles) == 1
    os.close(left)
    tier.close()
    device.close()


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"])
def test_a_mapping_that_fails_leaves_nothing(cuda: FakeCuda, call: str) -> None:
    device = CudaDevice(driver=cuda)
    tier = device.reserve(4 * EXTENT)
    fd = tier.new_extent(EXTENT)
    cuda.fail[call] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises((InvalidArgument, CudaError), match="CUDA_ERROR_NOT_SUPPORTED"):
        tier.adopt(1, fd, EXTENT)
    assert (tier.extents(), cuda.mapped, cuda.handles) == ({}, {}, {})
    tier.close()
    device.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_several_extents_are_mapped_at_once_each_at_its_place(cuda: FakeCuda, threads: int) -> None:
    device = CudaDevice(driver=cuda)
    tier = HbmTier(device, 9 * EXTENT, map_threads=threads)
    made = [(extent, tier.new_extent(EXTENT), EXTENT) for extent in (5, 3, 8, 1, 9, 2)]
    tier.adopt_all(made)
    assert [tier.offset(extent) for extent, _, _ in made] == [place * EXTENT for place in range(6)]
    assert cuda.accessible == {tier.base + place * EXTENT for place in range(6)}
    tier.adopt_all([])
    tier.close()
    device.close()


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemImportFromShareableHandle"])
def test_extents_of_which_one_fails_leave_no_descriptor(cuda: FakeCuda, call: str) -> None:
    device = CudaDevice(driver=cuda)
    tier = device.reserve(4 * EXTENT)
    made = [(extent, tier.new_extent(EXTENT), EXTENT) for extent in range(3)]
    cuda.fail[call] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises((InvalidArgument, CudaError), match="CUDA_ERROR_NOT_SUPPORTED"):
        tier.adopt_all(made)
    assert (tier.extents(), cuda.mapped, cuda.handles) == ({}, {}, {})
    tier.close()
    device.close()


def test_short_memory_is_a_clean_error(tier: DeviceTier, cuda: FakeCuda) -> None:
    cuda.memory_bytes = EXTENT
    with pytest.raises(ResourceExhausted, match="out of memory"):
        tier.new_extent(2 * EXTENT)
    for nbytes in (0, -EXTENT, EXTENT + 4096):
        with pytest.raises(InvalidArgument, match="multiple of 2MiB"):
            tier.new_extent(nbytes)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_driver_that_cannot_export_makes_plain_memory(cuda: FakeCuda, call: str) -> None:
    """Some containers and virtual GPUs refuse exportable memory: the worker did not start."""
    cuda.fail[call] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    device = CudaDevice(driver=cuda)
    cuda.fail.clear()
    tier = device.reserve(EXTENT)
    assert tier.sharing is Sharing.NONE
    assert device.why_plain == f"{call}: CUDA_ERROR_NOT_SUPPORTED"
    tier.close()
    device.close()


def test_a_gpu_is_found_by_its_uuid(cuda: FakeCuda) -> None:
    second = "GPU-02020202-0202-0202-0202-020202020202"
    device = CudaDevice(driver=cuda, uuid=second)
    assert (device.ordinal, device.uuid) == (1, second)
    assert device.reserve(EXTENT).device == "cuda:1"
    assert device.identity.startswith(f"cuda {second} ")
    assert device.identity.endswith(" 13000")
    cuda.reserved.clear()
    device.close()
    with pytest.raises(NotFound, match="no GPU GPU-x"):
        CudaDevice(driver=cuda, uuid="GPU-x")
    with pytest.raises(NotFound, match="no GPU 2"):
        CudaDevice(driver=cuda, index=2)


def test_what_is_missing_is_one_line(cuda: FakeCuda) -> None:
    cuda.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(FailedPrecondition, match="CUDA_ERROR_NO_DEVICE"):
        CudaDevice(driver=cuda)
    cuda.fail = {"cuDeviceGetAttribute": CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(CudaError):
        CudaDevice(driver=cuda)


def test_without_the_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(MissingExtra, match=r"kvstore\[cuda\]"):
        CudaDevice()


def test_a_broken_context_does_not_stop_the_end(cuda: FakeCuda) -> None:
    """After a sticky error every call fails; closing raised it again and hid what had happened."""
    device = CudaDevice(driver=cuda)
    tier = device.reserve(EXTENT)
    tier.adopt(1, tier.new_extent(EXTENT), EXTENT)
    broken = dict.fromkeys(("cuCtxSynchronize", "cuMemUnmap"), CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    cuda.fail = dict(broken)
    with pytest.raises(CudaError) as caught:
        tier.drop(1)
    assert caught.value.sticky
    tier.close()
    cuda.fail = {"cuMemcpyDtoH": CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(CudaError) as caught:
        tier.read(0, 4)
    assert not caught.value.sticky
    cuda.mapped.clear()  # the end of the process does that
    cuda.reserved.clear()
    device.close()


def test_an_extent_is_whole_slots_and_whole_pages_of_the_gpu(cuda: FakeCuda) -> None:
    """An extent that was no whole number of slots left a hole between pages, and attention read the wrong ones."""
    device = CudaDevice(driver=cuda)
    for slot_bytes in (4096, 184_320, 2 * MIB, 4 * MIB, 4 * MIB + 4096):
        slots, unit = slots_per_extent(device, slot_bytes)
        assert slots * slot_bytes % GRANULARITY == unit * slot_bytes % GRANULARITY == slots % unit == 0
        assert slots * slot_bytes <= max(GIB, unit * slot_bytes)
        wanted = hbm_slots(device, slot_bytes, 10 * GIB)
        assert wanted % unit == 0
        assert 10 * GIB <= wanted * slot_bytes + slot_bytes <= 10 * GIB + (unit + 1) * slot_bytes
    assert slots_per_extent(device, 4 * MIB) == (256, 1)
    assert slots_per_extent(TwinDevice(), 16_384) == (4096, 1)
    with pytest.raises(ResourceExhausted, match="less than a slot"):
        hbm_slots(device, 4 * MIB, MIB)
    device.close()
