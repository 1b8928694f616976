"""Launch settings of the paged attention kernel: one table, measured on an H200 by `bench/attention_tuning.py`.

Pure; imports neither torch nor triton. Settings never change results beyond the order of sums.
"""

from dataclasses import dataclass, replace

__all__ = ["KernelConfig", "decode_config", "prefill_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """How one launch is cut.

    A program takes `tile_rows` rows (query heads of one KV head times tokens; a power of two, at least 16) and walks
    keys in tiles of `tile_keys` tokens, `num_stages` of them in flight, with `num_warps` warps. Where the keys of a
    sequence are split, the splits are so long that about `waves` programs come to each multiprocessor.
    """

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int
    waves: int


# Only head_dim 128 with 4 query heads a KV head and blocks of 32 tokens has been swept
# (bench/results/h200/attention.json); other shapes have the defaults.
_SWEPT = (128, 4, 32)  # head_dim, query heads a KV head, block_tokens

_DECODE_DEFAULT = KernelConfig(tile_rows=16, tile_keys=64, num_warps=4, num_stages=3, waves=8)
_DECODE = {_SWEPT: KernelConfig(tile_rows=16, tile_keys=32, num_warps=2, num_stages=2, waves=4)}

# So few sequences have so many splits that merging them costs as much as walking the keys: fewer waves were faster with
# every setting.
_FEW_SEQUENCES = 4
_FEW_WAVES = 2
_FEW: dict[tuple[int, int, int], KernelConfig] = {
    _SWEPT: KernelConfig(tile_rows=16, tile_keys=32, num_warps=2, num_stages=3, waves=_FEW_WAVES)
}

_LONG_DEFAULT = KernelConfig(tile_rows=128, tile_keys=128, num_warps=8, num_stages=3, waves=2)
_LONG = {_SWEPT: KernelConfig(tile_rows=128, tile_keys=64, num_warps=8, num_stages=3, waves=2)}

# Up to so many rows a tile of 128 would be half empty.
_SHORT_ROWS = 64
_SHORT_DEFAULT = KernelConfig(tile_rows=64, tile_keys=64, num_warps=4, num_stages=3, waves=4)
_SHORT: dict[tuple[int, int, int], KernelConfig] = {}


# Keys of more than 256 bytes (float32, or a head_dim of 256): what fits into shared memory.
_WIDE_KEY_BYTES = 256
_WIDE_DEFAULT = KernelConfig(tile_rows=64, tile_keys=32, num_warps=4, num_stages=2, waves=4)


def decode_config(
    head_dim: int, group: int, block_tokens: int, itemsize: int, num_sequences: int
) -> KernelConfig:
    """For one row a sequence, of up to `num_sequences`.

    `group` is query heads a KV head, `itemsize` bytes an element.
    """
    key = (head_dim, group, block_tokens)
    config = _DECODE.get(key, _DECODE_DEFAULT)
    if head_dim * itemsize > _WIDE_KEY_BYTES:
        config = _WIDE_DEFAULT
    elif num_sequences <= _FEW_SEQUENCES:
        config = _FEW.get(key, replace(_DECODE_DEFAULT, waves=_FEW_WAVES))
    return replace(config, tile_rows=_tile_rows(16, group))


def prefill_config(
    head_dim: int, group: int, block_tokens: int, itemsize: int, num_tokens: int
) -> KernelConfig:
    """For chunks, of which the longest in the pass has `num_tokens` tokens."""
    key = (head_dim, group, block_tokens)
    if head_dim * itemsize > _WIDE_KEY_BYTES:
        config = _WIDE_DEFAULT
    elif num_tokens * group <= _SHORT_ROWS:
        config = _SHORT.get(key, _SHORT_DEFAULT)
    else:
        config = _LONG.get(key, _LONG_DEFAULT)
    return replace(config, tile_rows=_tile_rows(config.tile_rows, group))


def _tile_rows(wanted: int, group: int) -> int:
    """A tile holds at least one token's query heads."""
    return max(wanted, 1 << (group - 1).bit_length())
