"""What FlashInfer's kernels cannot attend over, known without it, so that our own take its place.

Imports no triton.
"""

import torch

__all__ = ["flashinfer_lacks"]

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)


def flashinfer_lacks(head_dim: int, dtype: torch.dtype) -> str:
    """Why FlashInfer cannot attend over heads of so many numbers of that type; empty where it can."""
    if head_dim not in _HEAD_DIMS:
        return f"it has no kernels for a head_dim of {head_dim}"
    if dtype not in _DTYPES:
        return f"it has no kernels for keys of {str(dtype).removeprefix('torch.')}"
    return ""
