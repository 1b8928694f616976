"""Chooses the next token from logits. A request's choices depend on its own logits and seed, never on its batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.errors import InvalidRequest

__all__ = ["SamplingParams", "choose", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and how many. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature must be between 0 and 100, not {self.temperature}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must not be negative, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidRequest(f"seed must be an unsigned 64-bit integer, not {self.seed}")


def sample(logits: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    """The next token of each row of `logits` `[rows, vocab]`; `indices[i]` counts the tokens row `i` has generated.

    The draw of token `n` under a seed is a function of (seed, n): preemption, restart or company do not shift it.
    """
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, index) in enumerate(zip(params, indices, strict=True)):
        if param.temperature > 0.0:
            chosen[row] = choose(logits[row], param, index)
    return chosen


def choose(logits: Tensor, params: SamplingParams, index: int) -> int:
    """Draw from one row `[vocab]` by temperature, then top-k, then top-p (nucleus), then inverse cumulative sum."""
    scaled = logits.float() / params.temperature
    count = min(params.top_k, scaled.numel()) if params.top_k else scaled.numel()
    values, tokens = (
        torch.topk(scaled, count) if params.top_k else torch.sort(scaled, descending=True, stable=True)
    )
    cumulative = torch.softmax(values.double(), dim=-1).cumsum(dim=-1)
    # The smallest set whose probability reaches top_p; its first token always stays.
    kept = int(torch.searchsorted(cumulative, params.top_p * float(cumulative[-1]))) + 1
    total = float(cumulative[min(kept, count) - 1])
    draw = np.random.Generator(np.random.Philox(key=params.seed, counter=index)).random() * total
    return int(tokens[min(int(torch.searchsorted(cumulative, draw, right=True)), kept - 1, count - 1)])
