"""The gate of SwiGLU in one pass."""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["silu_mul"]

_COLUMNS = 1024


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of `gate_up` `[rows, 2 * size]`, gate first; `[rows, size]`, into `out` where it is given."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size)) if out is None else out
    _silu_mul_kernel[(rows, triton.cdiv(size, _COLUMNS))](
        gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: `COLUMNS` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    gate = tl.load(gate_up + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two as torch does, so that both paths agree to the last bit but one.
    activated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (activated * up).to(out.dtype.element_ty), mask=inside)
