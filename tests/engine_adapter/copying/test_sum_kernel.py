"""The kernel that takes checksums: its source compiled for the host, thread by thread, is the checksum of storage.

What a device makes of it is in tests/gpu/test_sums.py.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_adapter.copying.sum_kernel import KIB, MAX_SUMS, SOURCE, SumShape, argument_of, defines_of
from engine_adapter.copying.summed import checksums_at

SHAPE = SumShape(ctas=2, summers=2)
_ENTRY = """
extern "C" void run(const Work* work, unsigned ctas) { run_on_host(sum_blocks, *work, ctas, 32 * (1 + SUMMERS)); }
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ here")
    folder = tmp_path_factory.mktemp("kernel")
    source, made = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(SOURCE + _ENTRY)
    shim = Path(__file__).with_name("host_cuda.hpp")
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-include", str(shim)]
    subprocess.run([*command, *defines_of(SHAPE), str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("kibs", [4, 5, 8, 64, 65, 127, 128, 132])
def test_it_is_the_checksum_of_storage(kernel: ctypes.CDLL, kibs: int) -> None:
    """Of one tile and of several, whole and cut, and of more blocks than there are CTAs."""
    blocks = np.random.default_rng(kibs).integers(0, 256, size=(3, kibs * KIB), dtype=np.uint8)
    at = np.arange(3, dtype=np.uint64) * np.uint64(kibs * KIB) + np.uint64(blocks.ctypes.data)
    sums = np.zeros((3, 2), dtype=np.uint64)
    kernel.run(argument_of(at, kibs * KIB, sums.ctypes.data), SHAPE.ctas)
    assert (sums == checksums_at(at, kibs * KIB)).all()


def test_a_launch_fits_into_a_parameter() -> None:
    addresses = np.zeros(MAX_SUMS, dtype=np.uint64)
    assert len(argument_of(addresses, 4096, 0)) <= 32764
