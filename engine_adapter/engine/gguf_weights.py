"""Reads weights out of GGUF files: dequantized, under their Hugging Face names.

The q/k row permutation that llama.cpp's converter applies for its interleaved rope is undone.
"""

import gguf
import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.gguf_file import GgufFile

__all__ = ["GgufTensors"]

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


class GgufTensors:
    """A GGUF file of the llama architecture. See `weights.load_weights`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def read(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, float32; KeyError."""
        if name in _GGUF_TOP:
            return self._tensor(_GGUF_TOP[name])
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        part = _GGUF_LAYER[module]
        tensor = self._tensor(f"blk.{index}.{part}.{kind}")
        return _unpermute(tensor, self._heads[part]) if part in self._heads else tensor

    def rope_factors(self) -> Tensor | None:
        """What the rope frequencies are divided by, `[head_dim / 2]`."""
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
