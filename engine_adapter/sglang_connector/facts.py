"""What a running SGLang says of itself: the facts that its KV's identity is made of (`identity`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from engine_adapter.sglang_connector.identity import HiCacheFacts
from kvstore.errors import InvalidArgument

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host import HostKVCache

__all__ = ["facts_of"]

_MODEL_SETTINGS = (
    "dtype",
    "json_model_override_args",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Settings of SGLang that change what a page holds; a draft model's KV may be in it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What SGLang's own settings say of the model, where this process has them."""

    model: str | None = None
    folder: str | None = None
    kv_cache_dtype: str = ""
    quantization: str = ""
    overrides: str = ""
    adapters: tuple[tuple[str, str | None], ...] = ()


def facts_of(config: HiCacheStorageConfig, pool: HostKVCache, page_bytes: int) -> HiCacheFacts:
    """All of it, of the rank that this process is. Raises InvalidArgument for a model without a name."""
    server = _server()
    model = config.model_name or server.model
    if not model:
        raise InvalidArgument("the model has no name: start SGLang with --served-model-name")
    return HiCacheFacts(
        version=version("sglang"),
        model=model,
        folder=server.folder,
        dtype=str(pool.dtype).removeprefix("torch."),
        kv_cache_dtype=server.kv_cache_dtype,
        quantization=server.quantization,
        overrides=server.overrides,
        adapters=server.adapters,
        page_tokens=pool.page_size,
        page_bytes=page_bytes,
        pool=f"{type(pool).__name__} {pool.layout} layers {pool.start_layer}-{pool.end_layer}",
        replicated=config.is_mla_model,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
    )


def _server() -> _Server:
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
    except (ImportError, ValueError):  # another version, or a process without settings
        return _Server()
    folder = str(args.model_path)
    return _Server(
        model=folder,
        folder=_local(folder, args.revision),
        kv_cache_dtype=str(args.kv_cache_dtype),
        quantization=str(args.quantization),
        overrides=json.dumps({name: str(getattr(args, name, None)) for name in _MODEL_SETTINGS}),
        adapters=tuple((lora.lora_name, _local(lora.lora_path, None)) for lora in args.lora_paths or ()),
    )


def _local(model: str, revision: str | None) -> str | None:
    """The folder of a model: itself, or where Hugging Face's cache has that revision of it."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return str(Path(config).parent) if isinstance(config, str) else None
