"""Small copies between pinned host memory and the device by threads instead of copy engines.

A copy engine takes one direction's copies in turn, so the 640 bytes of a step's rows come behind the hundreds of MiB of
blocks that are being stored. A kernel reads and writes the host's memory by itself, a few µs over PCIe.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_words"]

_WORDS = 1024


def copy_words(target: Tensor, source: Tensor) -> None:
    """`target` becomes `source`: int32, contiguous, as many elements; each on the device or in pinned host memory."""
    size = target.numel()
    assert target.is_contiguous()
    assert source.is_contiguous()
    assert source.numel() == size
    if size:
        _copy_words_kernel[(triton.cdiv(size, _WORDS),)](target, source, size, WORDS=_WORDS, num_warps=4)


@triton.jit(do_not_specialize=["size"])  # one compilation for all sizes
def _copy_words_kernel(target: tl.tensor, source: tl.tensor, size: int, WORDS: tl.constexpr) -> None:
    """One program: `WORDS` words."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = at < size
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
