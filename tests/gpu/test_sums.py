"""Checksums by a kernel on a device: bit for bit those of storage, for every size of slot, wherever blocks lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine_adapter.copying.cuda_driver import CudaDriver, cuda_devices
from engine_adapter.copying.sum_kernel import MAX_SUMS, SumKernel, SumShape
from engine_adapter.copying.summed import checksums_at
from tests.engine_adapter.copying.copier_rigs import SMALL_LIMITS, GpuRig, gpu_rig, rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_devices(), reason="no CUDA device")]

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def rig() -> Iterator[GpuRig]:
    with gpu_rig(limits=SMALL_LIMITS) as rig:
        yield rig


def summed(
    rig: GpuRig, driver: CudaDriver, blocks: np.ndarray, order: np.ndarray, shape: SumShape
) -> np.ndarray:
    """[n, 2] by the device, of the blocks in that order."""
    device = rig.device(blocks)
    place = rig.device(np.zeros((len(order), 16), dtype=np.uint8))
    with driver.current():
        stream = driver.create_stream(urgent=0.0)
        SumKernel(driver, shape).launch(
            device.addresses[order], blocks.shape[1], int(place.addresses[0]), stream
        )
        driver.synchronize_stream(stream)
        driver.destroy(streams=[stream], events=[])
    return place.read().view(np.uint64).reshape(-1, 2)


@pytest.mark.parametrize(
    "nbytes", [4 * KIB, 20 * KIB, 64 * KIB, 68 * KIB, 128 * KIB, 256 * KIB, 2 * MIB, 8 * MIB]
)
@pytest.mark.parametrize("shape", [SumShape(), SumShape(ctas=1), SumShape(ctas=32, summers=15)], ids=str)
def test_it_is_the_checksum_of_storage(rig: GpuRig, nbytes: int, shape: SumShape) -> None:
    count = max(3, min(300, 16 * MIB // nbytes))
    blocks = np.random.default_rng(nbytes).integers(0, 256, size=(count, nbytes), dtype=np.uint8)
    order = np.random.default_rng(count).permutation(count)
    kept = np.ascontiguousarray(blocks[order])
    assert (summed(rig, rig.driver, blocks, order, shape) == checksums_at(rows(kept), nbytes)).all()


def test_as_many_as_a_launch_takes(rig: GpuRig) -> None:
    blocks = np.random.default_rng(9).integers(0, 256, size=(MAX_SUMS, 4 * KIB), dtype=np.uint8)
    every = np.arange(MAX_SUMS)
    assert (summed(rig, rig.driver, blocks, every, SumShape()) == checksums_at(rows(blocks), 4 * KIB)).all()


def test_the_copier_takes_them(rig: GpuRig) -> None:
    """Else movers would, and nothing would say so but a line in the log."""
    assert rig.copier.takes_sums(4 * KIB)
