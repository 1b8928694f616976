"""RMSNorm in one pass, alone or with the residual added first. Sums in float32."""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`x / rms(x) * weight` of `x` `[rows, size]`, rows dense; into `out` where it is given."""
    out = torch.empty_like(x) if out is None else out
    _launch(x, x, weight, eps, out, adds=0)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add `x` to `residual` in place, both `[rows, size]`, and return the RMSNorm of the sum, as `rms_norm`.

    The sum is rounded to the tensors' type before it is normed, as when torch adds first.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, residual, weight, eps, out, adds=1)
    return out


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, *, adds: int) -> None:
    rows, size = x.shape
    padded = triton.next_power_of_2(size)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        eps,
        SIZE=size,
        PADDED=padded,
        ADDS=adds,
        num_warps=min(16, max(1, padded // 512)),
    )


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(
        tl.float32
    )  # before the sum, which it need not wait for
    if ADDS:
        at = residual + row * residual_stride + column
        added = (values + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, added, mask=inside)
        values = added.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    scaled = values * factor * scale
    tl.store(out + row * out_stride + column, scaled.to(out.dtype.element_ty), mask=inside)
