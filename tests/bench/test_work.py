"""Bytes and operations, against what is known of published shapes and a count by hand."""

from __future__ import annotations

import pytest

from bench.work import decode_step_bytes, prefill_flops, product_parameters
from engine_adapter.engine.shapes import shape_of


def test_parameters_of_a_known_model() -> None:
    """Llama-3.1-8B has 8.03 billion: those of its products, twice 128,256 × 4,096, and 266,240 of norms."""
    config = shape_of("llama-3.1-8b")
    assert config is not None
    norms = (2 * config.num_layers + 1) * config.hidden_size
    embeddings = 2 * config.vocab_size * config.hidden_size
    assert product_parameters(config) + embeddings + norms == 8_030_261_248


def test_a_decode_step_reads_weights_once_and_each_context() -> None:
    config = shape_of("llama-3.1-8b")
    assert config is not None
    alone = decode_step_bytes(config, batch=1, context_tokens=4096, itemsize=2)
    assert decode_step_bytes(config, batch=32, context_tokens=4096, itemsize=2) - alone == 31 * 4096 * 131_072
    weights = decode_step_bytes(config, batch=1, context_tokens=0, itemsize=2)
    assert weights == pytest.approx(2 * 7.5e9, rel=0.01)  # all but the embedding


def test_operations_of_a_prefill_are_those_of_its_products() -> None:
    """Counted one multiplication at a time for a tiny shape: each is two operations."""
    config = shape_of("llama-tiny")
    assert config is not None
    tokens = 5
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    count = 0
    for _layer in range(config.num_layers):
        for position in range(tokens):
            count += config.hidden_size * (query + 2 * kv) + query * config.hidden_size
            count += 3 * config.hidden_size * config.intermediate_size
            count += 2 * query * (position + 1)  # scores, and values weighted by them
    count += config.hidden_size * config.vocab_size
    assert prefill_flops(config, tokens) == 2 * count
