"""vLLM's tensors and groups as they are described to the copiers, without vLLM or torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.external.pages import PieceMap
from engine_adapter.vllm_connector.pages import attention_groups, cpu_layers, layer_pages, require_supported
from kvstore.errors import FailedPrecondition

BLOCKS, HEADS, TOKENS, DIM = 5, 2, 4, 3


class Tensor:
    """What of a torch tensor is looked at."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        self.array = array
        self.shape = array.shape

    def dim(self) -> int:
        return self.array.ndim

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def spec(kind: str, **fields: Any) -> Any:
    common = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": DIM,
        "head_size_v": DIM,
        "dtype": "float32",
    }
    return type(kind, (SimpleNamespace,), {})(**{**common, **fields})


def groups_of(*groups: tuple[list[str], Any]) -> Any:
    made = [SimpleNamespace(layer_names=names, kv_cache_spec=kind) for names, kind in groups]
    return SimpleNamespace(
        kv_cache_groups=made, transfer_group_ids=tuple(range(len(made))), num_blocks=BLOCKS
    )


def test_layers_of_several_groups() -> None:
    found = attention_groups(
        groups_of(
            (["a", "b"], spec("FullAttentionSpec")), (["c"], spec("SlidingWindowSpec", sliding_window=8))
        )
    )
    assert (found.block_tokens, found.windowed, found.numbers) == (TOKENS, True, (0, 1))
    caches = {name: Tensor(np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=np.float32)) for name in "cab"}
    layers = layer_pages(caches, found, BLOCKS)
    assert [layer.group for layer in layers] == [0, 0, 1]
    assert [layer.address for layer in layers] == [caches[name].data_ptr() for name in "abc"]
    assert PieceMap(layers).payload_bytes == 3 * HEADS * TOKENS * 2 * DIM * 4


def test_layers_of_one_group_that_differ() -> None:
    """Layers of several shapes in one block table (a draft's beside the model's)."""
    both = SimpleNamespace(
        block_size=TOKENS,
        kv_cache_specs={"a": spec("FullAttentionSpec"), "b": spec("FullAttentionSpec", num_kv_heads=1)},
    )
    assert attention_groups(groups_of((["a", "b"], both))).described.count("1 x") == 2


@pytest.mark.parametrize(
    "groups, why",
    [
        ([(["a"], spec("MambaSpec"))], "MambaSpec"),
        ([(["a"], spec("FullAttentionSpec")), (["b"], spec("FullAttentionSpec", block_size=8))], "4, 8"),
    ],
)
def test_what_cannot_be_cached_is_said(groups: Any, why: str) -> None:
    with pytest.raises(FailedPrecondition, match=why):
        attention_groups(groups_of(*groups))


def test_a_context_over_ranks_and_no_prefix_caching_cannot_be_cached() -> None:
    def config(**changes: int) -> Any:
        sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**{**sizes, **changes}),
            cache_config=SimpleNamespace(enable_prefix_caching=not changes.get("off")),
        )

    require_supported(config())
    for changes in ({"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}, {"off": 1}):
        with pytest.raises(FailedPrecondition):
            require_supported(config(**changes))


def test_blocks_of_a_kernel_are_joined() -> None:
    found = attention_groups(groups_of((["a"], spec("FullAttentionSpec"))))
    kernel = np.zeros((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM), dtype=np.float32)
    (layer,) = layer_pages({"a": Tensor(kernel)}, found, BLOCKS)
    assert layer.block_stride == 2 * kernel.strides[0]
    assert layer.nbytes == HEADS * TOKENS * 2 * DIM * 4
    with pytest.raises(FailedPrecondition, match="whole blocks"):
        layer_pages({"a": Tensor(kernel[:7])}, found, BLOCKS)
    with pytest.raises(FailedPrecondition, match="not one tensor"):
        layer_pages({"a": [kernel]}, found, BLOCKS)


def test_pages_that_only_the_backend_can_read_are_found_out() -> None:
    """As the CPU backend has them: a head's keys by dimension, then its values by token."""
    found = attention_groups(groups_of((["a"], spec("FullAttentionSpec"))))
    cache = np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=np.float32)
    layers = layer_pages({"a": Tensor(cache)}, found, BLOCKS)

    def write(key: NDArray[np.bool_], value: NDArray[np.bool_]) -> NDArray[np.bool_]:
        page = np.zeros((HEADS, 2, TOKENS * DIM), dtype=np.bool_)
        page[:, 0] = key.transpose(1, 2, 0).reshape(HEADS, -1)
        page[:, 1] = value.transpose(1, 0, 2).reshape(HEADS, -1)
        return page.reshape(-1)

    shared = cpu_layers(layers, write, heads=HEADS, tokens=TOKENS, head_dim=DIM)
    assert shared is not None
    (layer,) = shared
    assert layer.shape == (HEADS, TOKENS, DIM)
    assert (layer.key_offset, layer.key_strides) == (0, (2 * TOKENS * DIM * 4, 4, TOKENS * 4))
    assert (layer.value_offset, layer.value_strides) == (TOKENS * DIM * 4, (2 * TOKENS * DIM * 4, DIM * 4, 4))


def test_a_page_that_strides_cannot_describe_is_not_converted() -> None:
    """As for matrix units: pairs of rows are interleaved."""
    found = attention_groups(groups_of((["a"], spec("FullAttentionSpec"))))
    cache = np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=np.float32)
    layers = layer_pages({"a": Tensor(cache)}, found, BLOCKS)

    def write(key: NDArray[np.bool_], value: NDArray[np.bool_]) -> NDArray[np.bool_]:
        pairs = key.reshape(TOKENS // 2, 2, HEADS, DIM).transpose(2, 0, 3, 1)
        return np.concatenate([pairs.reshape(-1), value.reshape(-1)])

    assert cpu_layers(layers, write, heads=HEADS, tokens=TOKENS, head_dim=DIM) is None
