"""What this process's device can do, measured in the run that is compared with it: reads, products, pinned copies.

On a GPU these are the ceilings of decode (reads), prefill (products) and loads from DRAM (pinned copies). On the CPU
the same functions give small stand-ins, so that a benchmark runs there from end to end; such figures say nothing of a
GPU. Imports torch when called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.timing import median

if TYPE_CHECKING:
    import torch

__all__ = ["device_seconds", "pinned_copy_bytes_per_s", "product_flops_per_s", "read_bytes_per_s"]

_ROUNDS = 7
_CUDA_READ_BYTES = 8 << 30
_CPU_READ_BYTES = 64 << 20
_CUDA_SIDE = 8192
_CPU_SIDE = 512


def device_seconds(device: torch.device, call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median seconds of `call` on the device, after one call that is not counted."""
    call()
    times = [_cuda_s(device, call) if device.type == "cuda" else _host_s(call) for _ in range(rounds)]
    return median(times)


def _cuda_s(device: torch.device, call: Callable[[], object]) -> float:
    import torch

    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        begin.record()
        call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _host_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_bytes_per_s(device: torch.device, nbytes: int | None = None) -> float:
    """The better of a large reduction (bytes read) and a large copy (bytes read and written): decode's ceiling."""
    import torch

    size = nbytes or (_CUDA_READ_BYTES if device.type == "cuda" else _CPU_READ_BYTES)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    reduced_s = device_seconds(device, lambda: source.sum())
    copied_s = device_seconds(device, lambda: target.copy_(source))
    return max(size / reduced_s, 2 * size / copied_s)


def product_flops_per_s(device: torch.device, side: int | None = None) -> float:
    """Square products of random bfloat16 matrices (float32 on the CPU), 2 n³ operations each."""
    import torch

    cuda = device.type == "cuda"
    n = side or (_CUDA_SIDE if cuda else _CPU_SIDE)
    dtype = torch.bfloat16 if cuda else torch.float32
    left = torch.randn(n, n, dtype=dtype, device=device)
    right = torch.randn(n, n, dtype=dtype, device=device)
    out = torch.empty(n, n, dtype=dtype, device=device)
    repeats = 20 if cuda else 1  # one product alone would be measured with its launch

    def products() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)

    return repeats * 2 * n**3 / device_seconds(device, products)


def pinned_copy_bytes_per_s(device: torch.device, nbytes: int) -> float:
    """Host to device, one copy of pinned memory (a plain copy on the CPU): the ceiling of a load from DRAM."""
    import torch

    cuda = device.type == "cuda"
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / device_seconds(device, lambda: target.copy_(source, non_blocking=True))
