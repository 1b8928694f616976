"""HBM of a real GPU: bytes and blocks outlive their processes, nothing leaks, and torch sees the same memory.

The processes that own the device are children, which are killed; this one asks NVML, which makes no CUDA context.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.base import Pages
from kvstore.client import DeviceSpec
from kvstore.client.device import open_device
from kvstore.units import GIB, MIB
from tests.support.device_process import DeviceProcess, pattern
from tests.support.device_rounds import bytes_outlive_their_maker, kill_and_attach, started

pytest.importorskip("cuda.bindings.driver", reason="needs the CUDA bindings and a GPU")
pytestmark = pytest.mark.gpu

_SLACK_BYTES = 16 * MIB
_SETTLE_S = 10.0


@pytest.fixture(scope="module")
def used_bytes() -> Callable[[], int]:
    """HBM in use on the GPU that CUDA calls 0, by NVML."""
    pynvml: Any = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    process = DeviceProcess("cuda")
    handle = pynvml.nvmlDeviceGetHandleByUUID(process.ready()["uuid"])
    process.kill()
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _settled(used_bytes: Callable[[], int], most: int) -> int:
    """Use of HBM once it is at most `most`, or after the time that the driver may take to clean up."""
    until = time.monotonic() + _SETTLE_S
    while (used := used_bytes()) > most and time.monotonic() < until:
        time.sleep(0.05)
    return used


def _quiet(used_bytes: Callable[[], int]) -> int:
    """Use of HBM once it has not changed for a second: ended processes may still be cleaned up."""
    last, since, until = used_bytes(), time.monotonic(), time.monotonic() + _SETTLE_S
    while time.monotonic() < min(since + 1.0, until):
        time.sleep(0.05)
        if (used := used_bytes()) != last:
            last, since = used, time.monotonic()
    return last


def test_bytes_outlive_their_maker() -> None:
    bytes_outlive_their_maker("cuda", 256 * MIB)


def test_fifty_killed_processes_leak_nothing(used_bytes: Callable[[], int]) -> None:
    """HBM of killed workers stayed taken until the machine was restarted."""
    before = _quiet(used_bytes)
    nbytes = GIB
    with started("cuda") as (maker,):
        fd = maker.make(extent=0, nbytes=nbytes)
        for at in (0, nbytes - MIB):
            maker.ask("fill", extent=0, seed=0, nbytes=MIB, at=at)
    kept = _settled(used_bytes, before + nbytes + _SLACK_BYTES)
    assert nbytes <= kept - before <= nbytes + _SLACK_BYTES, "the extent alone outlives its maker"
    kill_and_attach("cuda", fd, rounds=50, nbytes=nbytes, side_by_side=10)
    after = _settled(used_bytes, kept + _SLACK_BYTES)
    assert after - kept <= _SLACK_BYTES
    os.close(fd)
    left = _settled(used_bytes, before + _SLACK_BYTES)
    assert left - before <= _SLACK_BYTES, "nothing is left once the last descriptor is closed"


def test_mapping_what_is_there_takes_little(record_property: Callable[[str, object], None]) -> None:
    """From kill -9 to the first token, nothing for KV may be left: it is all mapped again while weights are read."""
    with started("cuda") as (maker,):
        fds = [maker.make(extent=extent, nbytes=GIB) for extent in range(15)]
    with started("cuda") as (heir,):
        began = time.monotonic()
        for extent, fd in enumerate(fds):
            assert heir.ask("adopt", fd, extent=extent, nbytes=GIB) == {}
        each_s = (time.monotonic() - began) / len(fds)
    for fd in fds:
        os.close(fd)
    record_property("map_1_gib_s", each_s)
    print(f"mapping 1 GiB of HBM that was there takes {each_s * 1000:.1f} ms")
    assert each_s < 0.2


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_mapping_several_extents_at_once(
    threads: int, record_property: Callable[[str, object], None]
) -> None:
    """How long 16 GiB take by threads is printed; that each extent lies at its place is what must hold."""
    from tiers.hbm import CudaDevice, HbmTier

    device = CudaDevice()
    first = HbmTier(device, 16 * GIB)
    kept = [(extent, first.new_extent(GIB)) for extent in range(16)]
    first.adopt_all([(extent, os.dup(fd), GIB) for extent, fd in kept])
    for extent, _ in kept:
        first.write(first.base + first.offset(extent), pattern(extent, MIB))
    first.close()
    second = HbmTier(device, 16 * GIB, map_threads=threads)
    began = time.monotonic()
    second.adopt_all([(extent, fd, GIB) for extent, fd in kept])
    took_s = time.monotonic() - began
    record_property(f"map_16_gib_by_{threads}_threads_s", took_s)
    print(f"mapping 16 GiB by {threads} threads takes {took_s * 1000:.0f} ms")
    for extent, _ in kept:
        assert second.offset(extent) == extent * GIB
        assert second.read(second.base + extent * GIB, MIB) == pattern(extent, MIB)
    second.close()
    device.close()


def test_addresses_have_64_bits() -> None:
    """Page numbers times bytes a page went over 4 GiB in 32 bits, and blocks overwrote each other."""
    device = open_device(DeviceSpec(hbm_bytes=0, kind="cuda"))
    tier = device.reserve(400 * GIB)
    places = []
    for extent in range(6):
        tier.adopt(extent, tier.new_extent(GIB), GIB)
        places.append(tier.base + tier.offset(extent) + GIB - MIB)
    for seed, address in enumerate(places):
        tier.write(address, pattern(seed, MIB))
    assert all(tier.read(address, MIB) == pattern(seed, MIB) for seed, address in enumerate(places))
    assert places[-1] - tier.base > 1 << 32
    tier.close()
    device.close()


def test_torch_sees_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    from engine_adapter.engine.kv_pool import page_tensor

    device = open_device(DeviceSpec(hbm_bytes=0, kind="cuda"))
    tier = device.reserve(64 * GIB)
    for extent in range(3):
        tier.adopt(extent, tier.new_extent(2 * GIB), 2 * GIB)
    page_bytes = 4 * MIB
    pages = Pages(
        address=tier.base,
        count=tier.capacity_bytes // page_bytes,
        page_bytes=page_bytes,
        device=tier.device,
        owner=tier,
    )
    tensor = page_tensor(pages)
    assert (tensor.data_ptr(), tuple(tensor.shape)) == (tier.base, (pages.count, page_bytes))
    last = 6 * GIB // page_bytes - 1
    tensor[last] = torch.frombuffer(bytearray(pattern(9, page_bytes)), dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    assert tier.read(tier.base + last * page_bytes, page_bytes) == pattern(9, page_bytes)
    tier.write(tier.base + page_bytes, pattern(8, page_bytes))
    assert np.array_equal(tensor[1].cpu().numpy(), np.frombuffer(pattern(8, page_bytes), dtype=np.uint8))
    del tensor
    tier.close()
    device.close()


@pytest.mark.skipif(importlib.util.find_spec("lmdb") is None, reason="the daemon needs lmdb")
@pytest.mark.parametrize("scene", ["shared", "plain"])
def test_blocks_outlive_their_worker(used_bytes: Callable[[], int], scene: str) -> None:
    from tests.support.daemon import small_config
    from tests.support.daemon import started as service_started
    from tests.support.hbm_scenes import a_killed_worker_leaves_its_hbm, plain_hbm_goes_with_its_worker

    before = _quiet(used_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="kv") as folder,
        service_started(small_config(Path(folder))) as service,
    ):
        if scene == "shared":
            a_killed_worker_leaves_its_hbm(service, "cuda")
        else:
            plain_hbm_goes_with_its_worker(service, "cuda")
        assert any(gpu.memory_total_bytes for gpu in service.stats().gpus), (
            "NVML is there, and so are its GPUs"
        )
        left = _settled(used_bytes, before + _SLACK_BYTES)
        assert left - before <= _SLACK_BYTES, "nothing is left after a release"
