"""vLLM's KV tensors as `external.pages` describes them.

A layer is `[block, head, token, content]`, content K behind V or both in one, in whatever order the strides say; where
the backend takes smaller blocks than the scheduler a scheduler's block is several of the kernel's. The CPU backend
keeps pages that only it can read, which differ by instruction set: what goes where is found out by writing a page and
looking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.pages import Dimension, LayerPages, SharedLayer
from kvstore.errors import FailedPrecondition

__all__ = ["CacheGroups", "attention_groups", "cpu_layers", "layer_pages", "require_supported", "strides_of"]

_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_WINDOWED = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_AXES = ("H", "N", "C")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """vLLM's KV cache groups, as far as they matter here."""

    layers: tuple[tuple[int, tuple[str, ...]], ...]  # (group's number, names of its layers)
    block_tokens: int
    windowed: bool  # whether vLLM takes pages from running requests
    described: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the groups."""
        return tuple(number for number, _ in self.layers)


def require_supported(config: Any) -> None:
    """Raises FailedPrecondition where vLLM, configured so, has no blocks that could be shared."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise FailedPrecondition("a context that is spread over ranks cannot be cached")
    if not config.cache_config.enable_prefix_caching:
        raise FailedPrecondition("prefix caching is off")


def attention_groups(kv_cache_config: Any) -> CacheGroups:
    """Raises FailedPrecondition for a model that has anything but attention over blocks of one size."""
    layers, sizes, windowed, described = [], set(), False, []
    for number in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        for name, specs in _specs_of(group).items():
            if name not in _ATTENTION:
                raise FailedPrecondition(
                    f"layers of the kind {name} cannot be cached: vLLM serves without the store"
                )
            windowed |= name in _WINDOWED
            described += [f"{number}: {count} x {text}" for text, count in specs.items()]
        sizes.add(int(group.kv_cache_spec.block_size))
        layers.append((number, tuple(group.layer_names)))
    if len(sizes) != 1:
        raise FailedPrecondition(f"blocks of {sorted(sizes)} tokens in one model cannot be cached")
    return CacheGroups(
        layers=tuple(layers), block_tokens=sizes.pop(), windowed=windowed, described="; ".join(described)
    )


def _specs_of(group: Any) -> dict[str, dict[str, int]]:
    """Kind of layer → description → how many."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
    found: dict[str, dict[str, int]] = {}
    for layer in group.layer_names:
        spec = per_layer.get(layer, group.kv_cache_spec)
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or ""
        text = f"{type(spec).__name__} {spec.num_kv_heads}x{spec.head_size}x{spec.head_size_v} {spec.dtype} {window}"
        counts = found.setdefault(type(spec).__name__, {})
        counts[text] = counts.get(text, 0) + 1
    return found


def layer_pages(kv_caches: Mapping[str, Any], groups: CacheGroups, num_blocks: int) -> list[LayerPages]:
    """Of each layer, in the order of the groups. `kv_caches`: layer's name → tensor of what vLLM allocated.

    Raises FailedPrecondition for a tensor of another form.
    """
    found = []
    for group, (_, names) in enumerate(groups.layers):
        for name in names:
            tensor = kv_caches.get(name)
            if tensor is None or not hasattr(tensor, "stride") or tensor.dim() != 1 + len(_AXES):
                raise FailedPrecondition(
                    f"the KV of layer {name} is not one tensor of blocks: it cannot be cached"
                )
            found.append(_layer(tensor, group, num_blocks))
    return found


def _layer(tensor: Any, group: int, num_blocks: int) -> LayerPages:
    itemsize, (count, *sizes) = tensor.element_size(), tensor.shape
    strides = [stride * itemsize for stride in tensor.stride()]
    kernel_blocks, odd = divmod(count, num_blocks)
    if odd or not kernel_blocks:
        raise FailedPrecondition(
            f"{count} blocks of a kernel are not whole blocks of {num_blocks} of the scheduler"
        )
    axes = [
        Dimension(name=name, size=size, stride=stride)
        for name, size, stride in zip(_AXES, sizes, strides[1:], strict=True)
    ]
    if kernel_blocks > 1:
        axes.insert(0, Dimension(name="b", size=kernel_blocks, stride=strides[0]))
    return LayerPages(
        group=group,
        address=int(tensor.data_ptr()),
        block_stride=strides[0] * kernel_blocks,
        itemsize=itemsize,
        dimensions=tuple(axes),
    )


def cpu_layers(
    layers: Sequence[LayerPages],
    write: Callable[[NDArray[np.bool_], NDArray[np.bool_]], NDArray[np.bool_]],
    *,
    heads: int,
    tokens: int,
    head_dim: int,
) -> list[SharedLayer] | None:
    """Where K and V are in pages that only the backend can read; None where that cannot be said by strides.

    `write(key, value)`, [token, head, dim] of zeros and ones each, gives the page that the backend makes of them, flat.
    """
    shape = (tokens, heads, head_dim)
    zeros = np.zeros(shape, dtype=np.bool_)
    places = [
        _places(lambda half: write(half, zeros), shape),
        _places(lambda half: write(zeros, half), shape),
    ]
    itemsize = layers[0].itemsize
    found = [strides_of(place.transpose(1, 0, 2)) for place in places]
    if any(affine is None for affine in found):
        return None
    (key_offset, key_strides), (value_offset, value_strides) = (
        affine for affine in found if affine is not None
    )
    return [
        SharedLayer(
            address=layer.address,
            block_stride=layer.block_stride,
            itemsize=itemsize,
            shape=(heads, tokens, head_dim),
            key_offset=key_offset * itemsize,
            key_strides=_scaled(key_strides, itemsize),
            value_offset=value_offset * itemsize,
            value_strides=_scaled(value_strides, itemsize),
        )
        for layer in layers
    ]


def _places(
    write: Callable[[NDArray[np.bool_]], NDArray[np.bool_]], shape: tuple[int, int, int]
) -> NDArray[np.int64]:
    """Where in a page each element goes: one page for each bit of an element's number, whatever the element's type."""
    count = int(np.prod(shape))
    numbers = np.arange(count)
    marked = np.flatnonzero(write(np.ones(shape, dtype=np.bool_)))
    read = np.zeros(len(marked), dtype=np.int64)
    for bit in range(max(1, (count - 1).bit_length())):
        page = write((numbers >> bit & 1).astype(np.bool_).reshape(shape))
        read |= page[marked].astype(np.int64) << bit
    places = np.full(count, -1, dtype=np.int64)
    places[read[read < count]] = marked[read < count]
    return places.reshape(shape)


def strides_of(places: NDArray[np.int64]) -> tuple[int, tuple[int, int, int]] | None:
    """Offset and strides by which `places` [a, b, c] can be said; None: by none."""
    first = int(places[0, 0, 0])
    steps = [
        int(np.take(places, 1, axis=axis).flat[0]) - first if size > 1 else 1
        for axis, size in enumerate(places.shape)
    ]
    said = first + sum(
        np.arange(size).reshape([-1 if at == axis else 1 for at in range(3)]) * steps[axis]
        for axis, size in enumerate(places.shape)
    )
    if (places < 0).any() or not np.array_equal(said, places):
        return None
    return first, (steps[0], steps[1], steps[2])


def _scaled(strides: tuple[int, int, int], itemsize: int) -> tuple[int, int, int]:
    return (strides[0] * itemsize, strides[1] * itemsize, strides[2] * itemsize)
