"""How many bytes a decode step must read and how many operations a prefill must do, for a model of some shape. Pure.

Counted once each: every weight that a step multiplies by (of the embedding only the rows that are looked up, so it
counts only where it is the output matrix too), and the keys and values of every token in context. Nothing is counted
twice for how a kernel happens to work, so a share of the roofline below 1 is what is left to gain.
"""

from __future__ import annotations

from engine_adapter.engine.config import ModelConfig

__all__ = ["decode_step_bytes", "prefill_flops", "product_parameters"]


def product_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices of all layers, without embedding and output."""
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query + key_value) + query * config.hidden_size
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def decode_step_bytes(config: ModelConfig, *, batch: int, context_tokens: int, itemsize: int) -> int:
    """Bytes that one step of `batch` requests reads at least: weights once, and each request's keys and values."""
    weights = (product_parameters(config) + config.vocab_size * config.hidden_size) * itemsize
    return weights + batch * context_tokens * config.kv_token_bytes(itemsize)


def prefill_flops(config: ModelConfig, prompt_tokens: int) -> int:
    """Operations of a prefill from nothing: products of all tokens, causal attention, logits of the last token."""
    products = 2 * product_parameters(config) * prompt_tokens
    pairs = prompt_tokens * (prompt_tokens + 1) // 2  # a token attends to itself and to all before it
    attention = config.num_layers * 4 * config.num_heads * config.head_dim * pairs
    return products + attention + 2 * config.vocab_size * config.hidden_size
