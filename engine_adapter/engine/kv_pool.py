"""A block manager's pages as the engine sees them: `[page, layer, K|V, kv_head, token, head_dim]` over the bytes."""

import numpy as np
import torch
from torch import Tensor

from engine_adapter.base import Pages
from engine_adapter.engine.config import ModelConfig

__all__ = ["page_tensor", "view_pages"]


def page_tensor(pages: Pages) -> Tensor:
    """`pages` as bytes, `[count, page_bytes]`, on their device, shared."""
    if pages.device == "cpu":
        return torch.from_numpy(np.asarray(pages))
    torch.cuda.init()  # type: ignore[no-untyped-call]
    tensor = torch.as_tensor(pages, device=pages.device)
    if tensor.data_ptr() != pages.address:  # a copy would be written by the engine and read by nobody
        raise RuntimeError(f"torch copied the pages of {pages.device} instead of sharing them")
    return tensor


def view_pages(pages: Pages, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> Tensor:
    """View `pages` without copying; the padding at a page's end stays out of the view.

    ValueError when a page is too small for `block_tokens` tokens of this model.
    """
    payload_bytes = config.kv_token_bytes(dtype.itemsize) * block_tokens
    if pages.page_bytes < payload_bytes:
        raise ValueError(
            f"pages of {pages.page_bytes} bytes cannot hold {block_tokens} tokens: {payload_bytes} bytes"
        )
    payload = page_tensor(pages).view(dtype)[:, : payload_bytes // dtype.itemsize]
    return payload.view(pages.count, config.num_layers, 2, config.num_kv_heads, block_tokens, config.head_dim)
