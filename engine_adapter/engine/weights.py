"""Loads a model's weights as torch tensors, fused the way the model multiplies them. One device and one dtype for all.

Two readers give tensors by Hugging Face name: safetensors shards, and GGUF (`gguf_weights`). Every matrix ends in an
allocation of torch's own, 64-byte aligned: a product's last bits may depend on alignment, and deterministic mode
promises equal bits anywhere.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.source import ModelSource

__all__ = ["LayerWeights", "ModelWeights", "convert_weights", "load_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Projections are `[out, in]`; `qkv` stacks q, k, v and `gate_up` stacks gate, up along out.

    `q_norm` and `k_norm` are `[head_dim]`, of models that normalize each head.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """`embedding` and `lm_head` are `[vocab, hidden]`, one tensor where tied; `rope_factors` is `[head_dim / 2]`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    rope_factors: Tensor | None


def load_weights(
    source: ModelSource, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ModelWeights:
    """Read and fuse all weights of `source`. ModelError when a tensor is missing or has the wrong shape."""
    reader: _Tensors
    if source.gguf:
        # Here, because `gguf` is imported there: a worker of a safetensors model does without.
        from engine_adapter.engine.gguf_weights import GgufTensors

        reader = GgufTensors(source.gguf, source.config)
    else:
        reader = _SafeTensors(source.path)
    return _Assembler(reader, source.config, dtype, torch.device(device)).model()


def convert_weights(weights: ModelWeights, dtype: torch.dtype, device: torch.device | str) -> ModelWeights:
    """The same weights elsewhere; what is tied stays tied."""

    def convert(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device, dtype)

    embedding = weights.embedding.to(device, dtype)
    tied = weights.lm_head is weights.embedding
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(**{part.name: convert(getattr(layer, part.name)) for part in fields(layer)})
            for layer in weights.layers
        ),
        final_norm=weights.final_norm.to(device, dtype),
        lm_head=embedding if tied else weights.lm_head.to(device, dtype),
        rope_factors=convert(weights.rope_factors),
    )


class _Tensors(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, any float dtype, shaped as stored; KeyError."""
        ...

    def rope_factors(self) -> Tensor | None: ...


class _Assembler:
    """Checks shapes and fuses; the parts of a layer are dequantized in parallel (numpy drops the interpreter lock)."""

    def __init__(
        self, tensors: _Tensors, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._device = device

    def model(self) -> ModelWeights:
        c = self._config
        embedding_shape = (c.vocab_size, c.hidden_size)
        with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
            layers = pool.map(self._layer, range(c.num_layers))
            embedding = self._stack(["model.embed_tokens.weight"], [embedding_shape])
            tied = c.tied_embeddings
            head = embedding if tied else self._stack(["lm_head.weight"], [embedding_shape])
            return ModelWeights(
                embedding=embedding,
                layers=tuple(layers),
                final_norm=self._stack(["model.norm.weight"], [(c.hidden_size,)]),
                lm_head=head,
                rope_factors=self._tensors.rope_factors(),
            )

    def _layer(self, index: int) -> LayerWeights:
        c, base = self._config, f"model.layers.{index}."
        hidden, ffn = c.hidden_size, c.intermediate_size
        attn = [f"{base}self_attn.{part}_proj" for part in ("q", "k", "v")]
        gate_up = [f"{base}mlp.{part}_proj" for part in ("gate", "up")]
        out, down = [f"{base}self_attn.o_proj"], [f"{base}mlp.down_proj"]
        rows = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        return LayerWeights(
            input_norm=self._stack([f"{base}input_layernorm.weight"], [(hidden,)]),
            qkv=self._weight(attn, rows, hidden),
            qkv_bias=self._bias(attn, rows) if c.attention_bias else None,
            q_norm=self._head_norm(f"{base}self_attn.q_norm"),
            k_norm=self._head_norm(f"{base}self_attn.k_norm"),
            out=self._weight(out, [hidden], rows[0]),
            out_bias=self._bias(out, [hidden]) if c.attention_bias else None,
            mlp_norm=self._stack([f"{base}post_attention_layernorm.weight"], [(hidden,)]),
            gate_up=self._weight(gate_up, [ffn, ffn], hidden),
            gate_up_bias=self._bias(gate_up, [ffn, ffn]) if c.mlp_bias else None,
            down=self._weight(down, [hidden], ffn),
            down_bias=self._bias(down, [hidden]) if c.mlp_bias else None,
        )

    def _head_norm(self, module: str) -> Tensor | None:
        config = self._config
        return self._stack([f"{module}.weight"], [(config.head_dim,)]) if config.qk_norm else None

    def _weight(self, modules: list[str], rows: list[int], columns: int) -> Tensor:
        return self._stack([f"{name}.weight" for name in modules], [(n, columns) for n in rows])

    def _bias(self, modules: list[str], rows: list[int]) -> Tensor:
        return self._stack([f"{name}.bias" for name in modules], [(n,) for n in rows])

    def _stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Read tensors, check them and stack them along the first axis, converted to the model's dtype."""
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        total = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            try:
                tensor = self._tensors.read(name)
            except KeyError:
                raise ModelError(f"the model has no tensor {name!r}: its files are incomplete") from None
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}"
                )
            total[start : start + shape[0]].copy_(tensor)
            start += shape[0]
        return total


class _SafeTensors:
    """A Hugging Face folder: `model.safetensors`, or the shards that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in _shards(folder):
            try:
                with safe_open(path, framework="pt") as shard:
                    self._files.update(dict.fromkeys(shard.keys(), path))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        with safe_open(path, framework="pt") as shard:
            return cast("Tensor", shard.get_tensor(name))

    def rope_factors(self) -> Tensor | None:
        return None


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{folder} has no model.safetensors: other weight formats are not read")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} names a shard outside its folder")
    return [folder / name for name in names]
