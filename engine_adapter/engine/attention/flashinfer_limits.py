"""What FlashInfer's kernels cannot attend over, and what memory they need: known without it. Imports no triton."""

import torch

__all__ = ["flashinfer_lacks", "workspace_bytes"]

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_WORKSPACE_BYTES = 256 << 20
_TILE_ROWS = (16, 64, 128)  # query heads of one KV head that a tile takes: the smallest that holds them
_TILES_A_PROCESSOR = 2  # that keys are split into at most


def flashinfer_lacks(head_dim: int, dtype: torch.dtype) -> str:
    """Why FlashInfer cannot attend over heads of so many numbers of that type; empty where it can."""
    if head_dim not in _HEAD_DIMS:
        return f"it has no kernels for a head_dim of {head_dim}"
    if dtype not in _DTYPES:
        return f"it has no kernels for keys of {str(dtype).removeprefix('torch.')}"
    return ""


def workspace_bytes(
    num_heads: int, kv_heads: int, head_dim: int, *, max_sequences: int, multiprocessors: int
) -> int:
    """Device memory that FlashInfer's partial results take at most: float32, a tile for each row, or each split."""
    group = num_heads // kv_heads
    tile_rows = next((rows for rows in _TILE_ROWS if group <= rows), _TILE_ROWS[-1])
    tiles = max(
        max_sequences * (1 + -(-group // tile_rows)), _TILES_A_PROCESSOR * multiprocessors // kv_heads
    )
    return max(_LEAST_WORKSPACE_BYTES, tiles * tile_rows * num_heads * (head_dim + 1) * 4)
