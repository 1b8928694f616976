"""What makes KV of SGLang interchangeable, and the settings that its connector takes. Imports no SGLang, no torch.

SGLang names a page by a SHA-256 chain over all of its tokens, begun with the request's extra key (its LoRA among it)
and cache salt; images stand in the tokens with digests. Nothing else is in it, so all else is in the namespace here:
model, weights, KV type, page size, the page's bytes in the host pool's own order, which part of the model a rank has,
and the weights of LoRA adapters: SGLang calls one that it starts with by a digest of name and path, whatever is there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from engine_adapter.external.options import cache_use
from engine_adapter.fingerprint import files_digest, folder_digest
from kvstore.errors import ConfigError, InvalidArgument

__all__ = ["HiCacheFacts", "HiCacheOptions", "namespace_parts", "options_of"]

_OURS = "kvstore"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheOptions:
    """`{"kvstore": {…}}` in SGLang's `--hicache-storage-backend-extra-config`."""

    socket: str | None = None
    """Of the daemon; None: where `kvstore serve` listens by default."""
    weights: str | None = None
    """Names the weights where they are not in a folder of this machine: anything that is never the same for others."""
    load_s: float = 2.0
    """How long a load waits for its next page, which may be on a disk."""
    store_s: float = 1.0
    """How long a store waits for room."""
    cache: str = "on"
    """What this server does with the cache: `on`, `read`, `write`, `off` or `dry-run` (kvstore/cache_use.py)."""
    tenant: str | None = None
    """Whose pages they are; two tenants share none. None: nobody's in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheFacts:
    """What SGLang says of a rank. Sizes are counts unless they say bytes."""

    version: str  # of SGLang
    model: str
    folder: str | None  # of the weights, where there is one
    dtype: str  # of the host pool
    kv_cache_dtype: str  # as it was asked for: several 8-bit types look alike in the pool
    quantization: str
    overrides: str  # of the model's configuration
    adapters: tuple[
        tuple[str, str | None], ...
    ]  # name, and folder where there is one, of each LoRA it starts with
    page_tokens: int
    page_bytes: int
    pool: str  # class, layout and layers of the host pool: the order of a page's bytes
    replicated: bool  # every tensor-parallel rank has the same KV (MLA)
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int


def options_of(extra_config: Mapping[str, object] | None) -> HiCacheOptions:
    """The settings among those of SGLang. Raises ConfigError for one that is unknown or of another type."""
    given = (extra_config or {}).get(_OURS, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_OURS!r} in the storage backend's extra config is an object of settings")
    known = {field.name for field in fields(HiCacheOptions)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{_OURS} has no setting {unknown[0]!r}: use {', '.join(sorted(known))}")
    names = ("socket", "weights", "cache", "tenant")
    texts = {name: given[name] for name in names if given.get(name) is not None}
    times = {name: given[name] for name in ("load_s", "store_s") if name in given}
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{_OURS}.{name} is a text, not {value!r}")
    cache_use(texts.get("cache", "on"))
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 60:
            raise ConfigError(f"{_OURS}.{name} is a number of seconds from 0 to 60, not {value!r}")
    return HiCacheOptions(**texts, **times)  # checked above


def namespace_parts(facts: HiCacheFacts, weights: str | None, *, epoch: str = "") -> dict[str, bytes]:
    """The parts of a namespace (kvstore/identity.py). Reads the weights, in part where they are large.

    `epoch`: another one for what is stored after the engine's weights may have changed.

    Raises InvalidArgument where nothing says which weights these are: another model's KV could be taken for theirs.
    """
    if weights is not None:
        digest = b"named " + weights.encode()
    elif facts.folder is not None and Path(facts.folder).is_dir():
        digest = folder_digest(Path(facts.folder))
    else:
        raise InvalidArgument(
            f"the weights of {facts.model!r} are in no folder here: name them, "
            f'{{"{_OURS}": {{"weights": "<repository and revision>"}}}} in the storage backend\'s extra config'
        )
    parts = {
        "model": facts.model.encode(),
        "weights": digest,
        "dtype": f"{facts.dtype} {facts.kv_cache_dtype}".encode(),
        "quantization": facts.quantization.encode(),
        "block_tokens": str(facts.page_tokens).encode(),
        "groups": f"{facts.pool} {facts.page_bytes} bytes".encode(),
        "architecture": json.dumps({"engine": "sglang", "version": facts.version}).encode(),
        "rope": facts.overrides.encode(),
        "sharding": _sharding(facts).encode(),
    }
    if facts.adapters:
        parts["adapter"] = _adapters_digest(facts.adapters)
    if epoch:
        parts["epoch"] = epoch.encode()
    return parts


def _adapters_digest(adapters: Sequence[tuple[str, str | None]]) -> bytes:
    """Of all their files. One whose files are not known here is never the same as at another start."""
    state = hashlib.blake2b(digest_size=32)
    for name, folder in sorted(adapters, key=lambda adapter: adapter[0]):
        known = folder is not None and Path(folder).is_dir()
        state.update(
            json.dumps(name).encode() + (files_digest(Path(str(folder))) if known else os.urandom(32))
        )
    return state.digest()


def _sharding(facts: HiCacheFacts) -> str:
    tensor = "tp=all" if facts.replicated else f"tp={facts.tp_rank}/{facts.tp_size}"
    return f"{tensor} pp={facts.pp_rank}/{facts.pp_size} cp={facts.cp_rank}/{facts.cp_size}"
