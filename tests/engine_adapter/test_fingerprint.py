"""What makes KV interchangeable: whatever changes it changes the namespace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine_adapter import fingerprint
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model, find_shape
from engine_adapter.fingerprint import model_geometry, namespace_parts, weights_digest
from kvstore.identity import namespace_digest
from tests.engine_adapter.engine import tiny


def digest(folder: Path, *, block_tokens: int = 32, dtype: str = "float32", **settings: object) -> bytes:
    source = find_model(str(folder))
    geometry = model_geometry(source, block_tokens=block_tokens, dtype=dtype)
    values = EngineSettings(threads=1, **settings)  # type: ignore[arg-type]
    return namespace_digest(namespace_parts(source, geometry, values))


def test_a_copy_of_a_model_shares_and_another_seed_does_not(tmp_path: Path) -> None:
    first = tiny.save_folder(tmp_path / "a" / "model")
    copy = shutil.copytree(first, tmp_path / "b" / "model")
    other = tiny.save_folder(tmp_path / "c" / "model", seed=1)
    assert digest(first) == digest(copy)
    assert digest(first) != digest(other)


def test_everything_else_that_changes_kv_changes_the_namespace(tmp_path: Path) -> None:
    """The same tokens under another dtype, block size or rope were taken for the same blocks."""
    folder = tiny.save_folder(tmp_path / "a" / "model")
    rope = tiny.save_folder(tmp_path / "b" / "model", {"rope_theta": 20000.0})
    digests = [
        digest(folder),
        digest(folder, block_tokens=16),
        digest(folder, dtype="bfloat16"),
        digest(folder, deterministic=True),
        digest(rope),
    ]
    assert len(set(digests)) == len(digests)


def parts(folder: Path, settings: EngineSettings, dtype: str = "float32") -> dict[str, bytes]:
    source = find_model(str(folder))
    return namespace_parts(source, model_geometry(source, block_tokens=32, dtype=dtype), settings)


def test_a_gpus_kv_is_not_the_cpus(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path / "model")
    cpu, gpu, second = (EngineSettings(device=name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert parts(folder, cpu)["architecture"] != parts(folder, gpu)["architecture"]
    assert parts(folder, gpu) == parts(folder, second)
    exact = [
        EngineSettings(device="cuda:0", deterministic=True, device_name=name) for name in ("H200", "H100")
    ]
    assert parts(folder, exact[0]) != parts(folder, exact[1])


def test_models_without_norms_for_heads_keep_the_names_of_their_blocks(tmp_path: Path) -> None:
    """A new field of the configuration would have orphaned every block on disk."""
    folder = tiny.save_folder(tmp_path / "model")
    assert b"qk_norm" not in parts(folder, EngineSettings())["architecture"]
    qwen = tiny.save_folder(tmp_path / "qwen", {"architectures": ["Qwen3ForCausalLM"]})
    assert b"qk_norm" in parts(qwen, EngineSettings())["architecture"]


def test_random_weights_are_named_by_their_seed_and_where_they_were_drawn() -> None:
    def digest_of(seed: int, device: str) -> bytes:
        source = find_shape("llama-tiny", seed)
        geometry = model_geometry(source, block_tokens=32, dtype="float32")
        return namespace_digest(namespace_parts(source, geometry, EngineSettings(device=device)))

    assert digest_of(0, "cpu") == digest_of(0, "cpu")
    assert len({digest_of(0, "cpu"), digest_of(1, "cpu"), digest_of(0, "cuda:0")}) == 3


@pytest.mark.parametrize("at", [0, 100_000, 299_999])
def test_a_large_file_is_sampled_at_both_ends_and_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_SAMPLES", 7)
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 50_000)
    path = tmp_path / "large.gguf"
    path.write_bytes(bytes(300_000))
    before = weights_digest(path)
    data = bytearray(300_000)
    data[at] = 1
    path.write_bytes(data)
    assert weights_digest(path) != before
