"""What makes KV interchangeable: whatever changes it changes the namespace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine_adapter import fingerprint
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model
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
