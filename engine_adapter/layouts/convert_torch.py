"""Carries out a `Conversion` between tensors, on whatever device: one copy a start, in the current stream.

Not for the host alone: `layouts.convert` does the same there without torch. No engine uses it so far: on a GPU vLLM's
pages are kept as they lie, and this has run between host tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from engine_adapter.layouts.block_layout import Conversion, Part

__all__ = ["TensorCopy", "tensor_copy"]

TensorCopy: TypeAlias = Callable[[torch.Tensor, int, torch.Tensor, int], None]
"""Copies one block: (target, its block's first byte, source, its block's first byte), both uint8 `[bytes]`.

Where one of them is in pinned host memory and the other on a GPU, the copy is asynchronous.
"""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_copy(conversion: Conversion) -> TensorCopy:
    """The copy of blocks between tensors that a conversion says.

    Blocks begin at multiples of the words that its parts are copied in. Memory that is not contiguous on both sides
    goes between a GPU and the host by way of a temporary tensor, as torch does it: better copy a whole slot to the
    device first, and convert there.
    """
    copies = [_copy_of(part) for part in conversion.parts]

    def copy(target: torch.Tensor, target_at: int, source: torch.Tensor, source_at: int) -> None:
        for copy_part in copies:
            copy_part(target, target_at, source, source_at)

    return copy


def _copy_of(part: Part) -> TensorCopy:
    word, loops = part.word_bytes, part.loops
    size = (*(loop.count for loop in loops), part.piece_bytes // word)
    source_steps = (*(loop.source_step // word for loop in loops), 1)
    target_steps = (*(loop.target_step // word for loop in loops), 1)
    starts = list(zip(part.source_starts.tolist(), part.target_starts.tolist(), strict=True))

    def copy(target: torch.Tensor, target_at: int, source: torch.Tensor, source_at: int) -> None:
        to, of = target.view(_WORDS[word]), source.view(_WORDS[word])
        for source_start, target_start in starts:
            to.as_strided(size, target_steps, to.storage_offset() + (target_at + target_start) // word).copy_(
                of.as_strided(size, source_steps, of.storage_offset() + (source_at + source_start) // word),
                non_blocking=True,
            )

    return copy
