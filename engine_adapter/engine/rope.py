"""Rotary position embedding: a table of cosines and sines, and its application to queries and keys."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_adapter.engine.config import RopeConfig, RopeKind

__all__ = ["RopeTable", "make_rope_table", "rotate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """`cos` and `sin` are `[max_tokens, head_dim / 2]`, float32; a row is looked up by absolute position."""

    cos: Tensor
    sin: Tensor


def make_rope_table(
    rope: RopeConfig, head_dim: int, max_tokens: int, factors: Tensor | None, device: torch.device
) -> RopeTable:
    """The table for positions `[0, max_tokens)`; `factors` `[head_dim / 2]` divide the frequencies (GGUF llama3).

    Computed on the CPU, so that every device has the same bits.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = _stretch(rope, 1.0 / (rope.theta**steps))
    if factors is not None:
        inverse = inverse / factors.float().cpu()
    angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), inverse)
    return RopeTable(cos=angles.cos().to(device), sin=angles.sin().to(device))


def _stretch(rope: RopeConfig, inverse: Tensor) -> Tensor:
    if rope.kind is RopeKind.DEFAULT:
        return inverse
    if rope.kind is RopeKind.LINEAR:
        return inverse / rope.factor
    # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated.
    wavelength = 2 * math.pi / inverse
    turns = rope.original_max_tokens / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[rows, heads, head_dim]` by `cos` and `sin` `[rows, 1, head_dim / 2]`; halves form the pairs.

    The arithmetic is float32, the result of `x`'s dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
