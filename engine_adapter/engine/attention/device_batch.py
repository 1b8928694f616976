"""A batch's metadata on the device: one copy of one packed array, from pinned memory where there is a GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch

__all__ = ["DeviceBatch", "idle_batch", "to_device"]

_ALIGN = 4  # int32 a section is rounded up to, so that kernels compile for 16-byte aligned pointers once


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """int32 tensors; `rows`, `block_tables` and `context_lens` as in AttentionBatch, the others `[num_rows]`.

    Rows that no sequence owns have sequence -1 and position 0.
    """

    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor
    seq_of_row: Tensor
    positions: Tensor


def idle_batch(num_rows: int) -> AttentionBatch:
    """A pass of padding rows alone: it reads and writes no page."""
    return AttentionBatch(
        num_rows=num_rows,
        block_tables=np.zeros((1, 1), np.int32),
        rows=np.zeros((1, 2), np.int32),
        context_lens=np.zeros(1, np.int32),
    )


def to_device(batch: AttentionBatch, device: torch.device) -> DeviceBatch:
    """Queue the copy on the current stream; the batch may be changed as soon as this returns."""
    seq_of_row = np.full(batch.num_rows, -1, np.int32)
    for i, (start, end) in enumerate(batch.rows.tolist()):
        seq_of_row[start:end] = i
    parts = (
        batch.block_tables,
        batch.rows,
        batch.context_lens,
        seq_of_row,
        batch.positions().astype(np.int32),
    )
    copied = _copy(parts, device)
    return DeviceBatch(
        block_tables=copied[0],
        rows=copied[1],
        context_lens=copied[2],
        seq_of_row=copied[3],
        positions=copied[4],
    )


def _copy(parts: tuple[NDArray[np.int32], ...], device: torch.device) -> list[Tensor]:
    starts, size = [], 0
    for part in parts:
        starts.append(size)
        size += -(-part.size // _ALIGN) * _ALIGN
    host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for start, part in zip(starts, parts, strict=True):
        packed[start : start + part.size] = part.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + part.size].view(part.shape) for start, part in zip(starts, parts, strict=True)
    ]
