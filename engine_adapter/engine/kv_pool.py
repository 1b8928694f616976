"""A block manager's pages as the engine sees them: `[page, layer, K|V, kv_head, token, head_dim]` over the bytes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.config import ModelConfig

__all__ = ["view_pages"]


def view_pages(
    pages: NDArray[np.uint8], config: ModelConfig, block_tokens: int, dtype: torch.dtype
) -> Tensor:
    """View `pages` `[num_pages, page_bytes]` without copying; the padding at a page's end stays out of the view.

    ValueError when a page is too small for `block_tokens` tokens of this model.
    """
    payload_bytes = config.kv_token_bytes(dtype.itemsize) * block_tokens
    if pages.ndim != 2 or pages.shape[1] < payload_bytes:
        raise ValueError(
            f"pages of {pages.shape[-1]} bytes cannot hold {block_tokens} tokens: {payload_bytes} bytes"
        )
    payload = torch.from_numpy(pages).view(dtype)[:, : payload_bytes // dtype.itemsize]
    return payload.view(
        pages.shape[0], config.num_layers, 2, config.num_kv_heads, block_tokens, config.head_dim
    )
