"""What makes TensorRT-LLM's KV interchangeable, and which of its requests can be told apart by their tokens.

Looks at TensorRT-LLM's arguments and requests by their attributes; imports none of it. What cannot be named raises
FailedPrecondition, and is not cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapter.external.link import Identity
from engine_adapter.fingerprint import folder_digest
from kvstore.errors import FailedPrecondition

__all__ = ["KvShape", "identity_of", "namespace_parts", "require_supported"]

_REVISION = 1  # raised when what is taken from TensorRT-LLM's arguments changes
_NOT_TOKENS = (
    "encoder_tokens",
    "input_token_extra_ids",
    "lora_task_id",
    "mrope_rotary_cos_sin",
    "multimodal_embedding",
    "multimodal_hashes",
    "prompt_embedding_table",
)
"""Of a request: with any of these its KV is a function of more than its tokens and salt."""
_ARGUMENTS = ("attn_backend", "dtype", "model_kwargs", "revision", "sparse_attention_config")
"""Arguments that change the bytes of a block and are named nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """How the ranks keep a block: each `payload_bytes`, in the order that `order` says."""

    block_tokens: int
    payload_bytes: int
    order: str
    ranks: int


def identity_of(request: Any) -> Identity | None:
    """What sets the request apart besides its tokens; None: it cannot be told apart, and is not cached."""
    if any(getattr(request, name, None) is not None for name in _NOT_TOKENS):
        return None
    salt = getattr(request, "cache_salt", None)
    if salt is None:
        number = getattr(request, "cache_salt_id", None)  # a hash of it: what older versions tell
        salt = None if number is None else f"id {number}"
    else:
        salt = f"text {salt}"
    return Identity(salt=salt)


def require_supported(args: Any) -> None:
    """Raises FailedPrecondition for arguments with which blocks hold more than the model's own KV."""
    if getattr(args, "speculative_config", None) is not None:
        raise FailedPrecondition("speculative decoding: pages may hold KV of a draft model")
    if "nvfp4" in str(getattr(_cache_config(args), "dtype", "")).lower():
        raise FailedPrecondition("KV in 4 bits has scales in a pool of its own")
    if getattr(args, "enable_attention_dp", False):
        raise FailedPrecondition("attention data parallelism: each rank schedules for itself")


def namespace_parts(
    args: Any,
    version: str,
    shape: KvShape,
    identity: Identity,
    *,
    find_folder: Callable[[str, str | None], str | None],
) -> Mapping[str, bytes]:
    """The parts of a namespace (kvstore/identity.py). Reads the weights, in part where they are large.

    `find_folder(model, revision)`: where a hub's model lies on this machine; None: nowhere.
    """
    model = str(args.model)
    folder = model if Path(model).is_dir() else find_folder(model, getattr(args, "revision", None))
    if folder is None:
        raise FailedPrecondition(
            f"the weights of {model} are no files on this machine: they cannot be told apart"
        )
    settings = {name: str(getattr(args, name, None)) for name in _ARGUMENTS}
    parts = {
        "model": Path(model).name.encode(),
        "weights": folder_digest(Path(folder)),
        "dtype": str(getattr(_cache_config(args), "dtype", "auto")).encode(),
        "block_tokens": str(shape.block_tokens).encode(),
        "groups": shape.order.encode(),
        "architecture": json.dumps(
            {"engine": f"tensorrt-llm {_REVISION}", "version": version, **settings}, sort_keys=True
        ).encode(),
        "codec": b"as it lies",
        "quantization": str(getattr(args, "quant_config", None)).encode(),
        "sharding": f"tensorrt-llm tp={shape.ranks}".encode(),
    }
    return parts | ({} if identity.salt is None else {"salt": identity.salt.encode()})


def _cache_config(args: Any) -> Any:
    return getattr(args, "kv_cache_config", None)
