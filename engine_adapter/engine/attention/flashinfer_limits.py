"""What FlashInfer's kernels cannot attend over, known without it, so that our own take its place.

Imports no triton.
"""

import torch
from torch import Tensor

__all__ = ["flashinfer_lacks"]

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)


def flashinfer_lacks(pool: Tensor) -> str:
    """Why FlashInfer cannot attend over `pool` `[page, layer, K|V, kv_head, token, head_dim]`; empty where it can."""
    head_dim = pool.shape[5]
    if head_dim not in _HEAD_DIMS:
        return f"it has no kernels for a head_dim of {head_dim}"
    if pool.dtype not in _DTYPES:
        return f"it has no kernels for keys of {str(pool.dtype).removeprefix('torch.')}"
    return ""
