"""What makes vLLM's KV interchangeable: the parts of a namespace (kvstore/identity.py lists the tags).

vLLM's own block hashes name neither the model nor its weights, so nothing is taken from them. A model that the bundled
engine knows as well, computed in the plain way, has the bundled engine's parts where its blocks have the shared
layout: the two then read each other's blocks. Everything else has parts of vLLM's own, which name whatever of its
configuration changes the bytes of a block. What cannot be named (weights that are no files here, scales that a process
makes up) raises FailedPrecondition, and is not cached.

Imports no vLLM and no torch: it looks at vLLM's configuration by its attributes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_adapter.engine.config import ModelConfig, config_from_hf
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource, find_model
from engine_adapter.external.link import Identity
from engine_adapter.fingerprint import namespace_parts, weights_digest
from kvstore.errors import FailedPrecondition, KvstoreError
from kvstore.geometry import Geometry

__all__ = ["KvShape", "VllmIdentity", "kv_dtype", "shared_source"]

_REVISION = 1  # raised when what is taken from vLLM's configuration changes
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_MAX_PART_BYTES = 4096
_MAX_ADAPTERS = 4096
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
"""Of a Hugging Face configuration: said elsewhere, or of no effect on KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """How the ranks keep a block. `shared`: as the bundled engine does; else `order` says how the bytes lie."""

    block_tokens: int
    geometry: Geometry
    order: str
    groups: str
    parts: int  # ranks that have something of their own of a block
    shared: bool


def kv_dtype(config: Any) -> str:
    """Element type of the KV, as torch calls it, without its module."""
    wanted = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if wanted == "auto" else wanted


def shared_source(config: Any) -> ModelSource | None:
    """The model as the bundled engine reads it, where both compute the same; None: they do not."""
    model, parallel = config.model_config, config.parallel_config
    plain = (
        model.quantization is None
        and config.cache_config.cache_dtype == "auto"
        and config.speculative_config is None
        and parallel.pipeline_parallel_size == 1
        and config.load_config.load_format != "dummy"
    )
    if not plain:
        return None
    try:
        source = find_model(str(model.model))
        used = config_from_hf(model.hf_config.to_dict())
    except (ModelError, KvstoreError):
        return None
    return source if source.gguf is None and _same(source.config, used) else None


def _same(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations compute the same KV. Where a turn ends, and how long one may be, does not matter."""
    return one == replace(
        other,
        bos_token_id=one.bos_token_id,
        eos_token_ids=one.eos_token_ids,
        max_tokens=one.max_tokens,
    )


class VllmIdentity:
    """Parts for requests of one vLLM. Reads weights once, so it is called on a thread that may wait."""

    def __init__(
        self, config: Any, shape: KvShape, *, find_folder: Callable[[str, str | None], str | None]
    ) -> None:
        """`config`: vLLM's. `find_folder(model, revision)`: where a hub's model lies on this machine; None: nowhere."""
        self._config = config
        self._shape = shape
        self._find_folder = find_folder
        self._parts: dict[str, bytes] | None = None
        self._adapters: dict[tuple[str, str], bytes] = {}

    def parts(self, identity: Identity) -> Mapping[str, bytes]:
        """See `StorePlan`. Raises: FailedPrecondition for what cannot be named."""
        if self._parts is None:
            self._parts = self._shared_parts() if self._shape.shared else self._own_parts()
        parts = dict(self._parts)
        if identity.adapter is not None:
            parts["adapter"] = self._adapter(identity.adapter)
        if identity.salt is not None:
            parts["salt"] = _bounded(identity.salt.encode())
        if identity.epoch:
            parts["epoch"] = identity.epoch.encode()
        return parts

    def _shared_parts(self) -> dict[str, bytes]:
        source = shared_source(self._config)
        if source is None:
            raise FailedPrecondition("the model is no longer what it was when this engine started")
        device = "cuda:0" if self._device() == "cuda" else self._device()
        settings = EngineSettings(device=device, tensor_parallel=self._shape.parts)
        return namespace_parts(source, self._shape.geometry, settings)

    def _own_parts(self) -> dict[str, bytes]:
        config, model = self._config, self._config.model_config
        if getattr(config.cache_config, "calculate_kv_scales", False):
            raise FailedPrecondition("KV scales that each process makes up for itself cannot be named")
        described = {
            key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_THE_MODEL
        }
        architecture = {
            "engine": f"vllm {_REVISION} {self._device()}",
            "architectures": list(model.architectures or ()),
            "dtype": str(model.dtype),
            "config": described,
            "draft": self._draft(),
        }
        return {
            "model": Path(str(model.model)).name.encode(),
            "weights": self._weights(str(model.model), model.revision),
            "dtype": kv_dtype(config).encode(),
            "block_tokens": str(self._shape.block_tokens).encode(),
            "groups": _bounded(self._shape.groups.encode()),
            "architecture": _bounded(json.dumps(architecture, sort_keys=True, default=str).encode()),
            "codec": _bounded(f"as it lies: {self._shape.order}".encode()),
            "quantization": str(model.quantization or "").encode(),
            "sharding": self._sharding(),
        }

    def _sharding(self) -> bytes:
        parallel = self._config.parallel_config
        return f"vllm tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size}".encode()

    def _device(self) -> str:
        return str(self._config.device_config.device_type)

    def _draft(self) -> str:
        draft = self._config.speculative_config
        if draft is None:
            return ""
        model = getattr(draft, "model", None)
        named = self._weights(str(model), getattr(draft, "revision", None)).hex() if model else ""
        return f"{getattr(draft, 'method', '')} {named}"

    def _weights(self, model: str, revision: str | None) -> bytes:
        """A digest of the weights' files."""
        if self._config.load_config.load_format == "dummy":
            return f"dummy seed={self._config.model_config.seed}".encode()
        folder = model if Path(model).exists() else self._find_folder(model, revision)
        if folder is None:
            raise FailedPrecondition(
                f"the weights of {model} are no files on this machine: they cannot be told apart"
            )
        return _digest(Path(folder))

    def _adapter(self, adapter: tuple[str, str]) -> bytes:
        """Read once: what is on the disk later is not what the engine has loaded."""
        if adapter not in self._adapters:
            folder = Path(adapter[1])
            if not folder.is_dir():
                raise FailedPrecondition(
                    f"the adapter {adapter[0]} is no folder on this machine: it is not cached"
                )
            if len(self._adapters) >= _MAX_ADAPTERS:
                raise FailedPrecondition(f"{_MAX_ADAPTERS} adapters are known already: more are not cached")
            self._adapters[adapter] = _digest(folder)
        return self._adapters[adapter]


def _digest(path: Path) -> bytes:
    """Of a file, or of the weights and the JSON files of a folder."""
    if path.is_file():
        return weights_digest(path)
    files = sorted(
        file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES or file.suffix == ".json"
    )
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise FailedPrecondition(f"{path} has no weights that could be told apart")
    state = hashlib.blake2b(digest_size=32)
    for file in files:
        state.update(weights_digest(file))
    return state.digest()


def _bounded(value: bytes) -> bytes:
    """As it is, or its digest where it is long; the two cannot meet."""
    if len(value) < _MAX_PART_BYTES:
        return b"=" + value
    return b"#" + hashlib.blake2b(value, digest_size=32).digest()
