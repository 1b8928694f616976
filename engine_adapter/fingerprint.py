"""What makes the bundled engine's KV interchangeable: the parts of a namespace (kvstore/identity.py lists the tags).

Two engines share KV only when every part is equal. Deterministic mode has namespaces of its own, because its promise
(bit for bit the same, cold or cached) holds only for KV that was computed in the same way, by as many threads.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource
from kvstore.geometry import Geometry, LayerGroup

__all__ = ["files_digest", "folder_digest", "model_geometry", "namespace_parts", "weights_digest"]

_WHOLE_BYTES = 256 << 20
_SAMPLES = 1024
_SAMPLE_BYTES = 64 << 10
_ENGINE_REVISION = 1  # raised when the engine's mathematics change
_DETERMINISTIC_REVISION = 2  # as that, of deterministic mode; 1 could exchange the KV of two requests


def model_geometry(source: ModelSource, *, block_tokens: int, dtype: str) -> Geometry:
    """The shape of a block of this model."""
    config = source.config
    group = LayerGroup(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
    )
    return Geometry(groups=(group,), dtype=dtype)


def namespace_parts(source: ModelSource, geometry: Geometry, settings: EngineSettings) -> dict[str, bytes]:
    """The parts that the bundled engine states. Reads the weights once; random ones are named by their seed.

    A GPU's KV is not shared with the CPU's, nor that of random weights drawn there. In deterministic mode it is the KV
    of one kind of GPU (`settings.device_name`).
    """
    config, group = source.config, geometry.groups[0]
    kind = settings.device.partition(":")[0]
    engine = f"bundled {_ENGINE_REVISION}" + ("" if kind == "cpu" else f" {kind}")
    if settings.deterministic:
        where = f"threads={settings.threads}" if kind == "cpu" else f"gpu={settings.device_name}"
        engine += f" deterministic {_DETERMINISTIC_REVISION} {where} torch={version('torch')}"
    sizes = asdict(config)
    rope = sizes.pop("rope")
    if not sizes["qk_norm"]:
        del sizes[
            "qk_norm"
        ]  # so that models without it keep the names that their blocks had before it was known
    # Of a block that is shared among devices each has the part of its heads, one part behind the other.
    sharding = settings.tensor_parallel
    shared = {} if sharding == 1 else {"sharding": f"tp={sharding}".encode()}
    return shared | {
        "model": source.path.name.encode(),
        "weights": weights_digest(source.path) if source.seed is None else _random_weights(source.seed, kind),
        "dtype": geometry.dtype.encode(),
        "block_tokens": str(group.block_tokens).encode(),
        "groups": f"{group.rule.name} {group.layers}x{group.kv_heads}x{group.head_dim}".encode(),
        "architecture": _canonical({"engine": engine, **sizes}),
        "rope": _canonical(rope),
    }


def weights_digest(path: Path) -> bytes:
    """32 bytes of a GGUF file, or of a folder's weights and configuration.

    A file up to 256 MiB is read whole; of a larger one its size, both ends and evenly spread samples, 64 MiB in all.
    """
    state = hashlib.blake2b(digest_size=32)
    for file in _files(path):
        size = file.stat().st_size
        state.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            for offset, length in _pieces(size):
                data.seek(offset)
                state.update(data.read(length))
    return state.digest()


def folder_digest(folder: Path) -> bytes:
    """32 bytes of a model's folder: as `weights_digest`, or of every file where it has no safetensors."""
    return weights_digest(folder) if any(folder.glob("*.safetensors")) else files_digest(folder)


def files_digest(folder: Path) -> bytes:
    """32 bytes of every file in a folder, those below it left out; of each as `weights_digest`."""
    state = hashlib.blake2b(digest_size=32)
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        state.update(weights_digest(file))
    return state.digest()


def _random_weights(seed: int, device_kind: str) -> bytes:
    return f"random seed={seed} drawn on {device_kind}".encode()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        file for file in path.iterdir() if file.suffix == ".safetensors" or file.name == "config.json"
    )


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is read of a file of `size` bytes."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    step = (size - _SAMPLE_BYTES) // (_SAMPLES - 1)
    for index in range(_SAMPLES - 1):
        yield index * step, _SAMPLE_BYTES
    yield size - _SAMPLE_BYTES, _SAMPLE_BYTES


def _canonical(value: dict[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
