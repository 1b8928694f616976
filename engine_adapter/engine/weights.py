"""Loads a model's weights as torch tensors, fused the way the model multiplies them. CPU, one dtype for all.

Two readers give tensors by Hugging Face name: safetensors shards, and GGUF (dequantized; the q/k row permutation that
llama.cpp's converter applies for its interleaved rope is undone). Every matrix ends in an allocation of torch's own,
64-byte aligned: a product's last bits may depend on alignment, and deterministic mode promises equal bits anywhere.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.gguf_file import GgufFile
from engine_adapter.engine.source import ModelSource

__all__ = ["LayerWeights", "ModelWeights", "load_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Projections are `[out, in]`; `qkv` stacks q, k, v and `gate_up` stacks gate, up along out."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
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


def load_weights(source: ModelSource, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """Read and fuse all weights of `source`. ModelError when a tensor is missing or has the wrong shape."""
    reader = _GgufTensors(source.gguf, source.config) if source.gguf else _SafeTensors(source.path)
    return _Assembler(reader, source.config, dtype).model()


class _Tensors(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, any float dtype, shaped as stored; KeyError."""
        ...

    def rope_factors(self) -> Tensor | None: ...


class _Assembler:
    """Checks shapes and fuses; the parts of a layer are dequantized in parallel (numpy drops the interpreter lock)."""

    def __init__(self, tensors: _Tensors, config: ModelConfig, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._config = config
        self._dtype = dtype

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
            out=self._weight(out, [hidden], rows[0]),
            out_bias=self._bias(out, [hidden]) if c.attention_bias else None,
            mlp_norm=self._stack([f"{base}post_attention_layernorm.weight"], [(hidden,)]),
            gate_up=self._weight(gate_up, [ffn, ffn], hidden),
            gate_up_bias=self._bias(gate_up, [ffn, ffn]) if c.mlp_bias else None,
            down=self._weight(down, [hidden], ffn),
            down_bias=self._bias(down, [hidden]) if c.mlp_bias else None,
        )

    def _weight(self, modules: list[str], rows: list[int], columns: int) -> Tensor:
        return self._stack([f"{name}.weight" for name in modules], [(n, columns) for n in rows])

    def _bias(self, modules: list[str], rows: list[int]) -> Tensor:
        return self._stack([f"{name}.bias" for name in modules], [(n,) for n in rows])

    def _stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Read tensors, check them and stack them along the first axis, converted to the model's dtype."""
        total = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype)
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


_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class _GgufTensors:
    """A GGUF file of the llama architecture."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def read(self, name: str) -> Tensor:
        if name in _GGUF_TOP:
            return self._tensor(_GGUF_TOP[name])
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        part = _GGUF_LAYER[module]
        tensor = self._tensor(f"blk.{index}.{part}.{kind}")
        return _unpermute(tensor, self._heads[part]) if part in self._heads else tensor

    def rope_factors(self) -> Tensor | None:
        name = "rope_freqs.weight"
        return self._tensor(name) if name in self._file.tensors else None

    def _tensor(self, name: str) -> Tensor:
        entry = self._file.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(entry.ggml_type)
            byte_shape = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        except ValueError as error:
            raise ModelError(f"{self._file.path}: tensor {name!r}: {error}") from error
        raw = self._file.data[entry.offset : entry.offset + int(np.prod(byte_shape))]
        if raw.size != int(np.prod(byte_shape)):
            raise ModelError(f"{self._file.path} is cut off within tensor {name!r}")
        try:
            values = gguf.dequantize(_typed(raw, kind).reshape(_dequantize_rows(byte_shape[0]), -1), kind)
        except NotImplementedError as error:
            raise ModelError(f"{self._file.path}: quantization {kind.name} is not supported") from error
        writable = np.require(values, np.float32, ["C", "W"])  # what is F32 already is still the mapped file
        return torch.from_numpy(writable).view(entry.shape)


def _dequantize_rows(num_rows: int) -> int:
    """As how many rows to dequantize: `gguf` takes 16 at a time, too few for numpy where rows are short."""
    return num_rows // 16 if num_rows % 16 == 0 else num_rows


def _typed(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32)
    return raw.view(np.float16) if kind == gguf.GGMLQuantizationType.F16 else raw


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the converter's reordering of q/k rows: per head `[dim / 2, 2]` interleaved pairs back to two halves."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)
