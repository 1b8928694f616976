"""The launch settings of the attention kernel, whatever is in the table, must fit the kernel and the hardware."""

import itertools

import pytest

from engine_adapter.engine.attention.tuning import KernelConfig, decode_config, prefill_config

SHARED_BYTES = 227 * 1024  # of one program on Hopper

SHAPES = list(itertools.product((16, 64, 128, 256), (1, 3, 4, 8, 32), (16, 32, 64, 1024), (2, 4)))


def check(config: KernelConfig, head_dim: int, group: int, itemsize: int) -> None:
    assert config.tile_rows >= max(16, group)
    for size in (config.tile_rows, config.tile_keys, config.num_warps):
        assert size & (size - 1) == 0
    query_bytes = config.tile_rows * head_dim * itemsize
    keys_bytes = 2 * config.tile_keys * head_dim * itemsize * config.num_stages
    assert query_bytes + keys_bytes <= SHARED_BYTES


@pytest.mark.parametrize("head_dim, group, block_tokens, itemsize", SHAPES)
def test_settings_fit(head_dim: int, group: int, block_tokens: int, itemsize: int) -> None:
    for sequences in (1, 4, 5, 256):
        config = decode_config(head_dim, group, block_tokens, itemsize, sequences)
        check(config, head_dim, group, itemsize)
    for tokens in (2, 16, 500, 8192):
        check(prefill_config(head_dim, group, block_tokens, itemsize, tokens), head_dim, group, itemsize)
