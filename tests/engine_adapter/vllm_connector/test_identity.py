"""What sets vLLM's namespaces apart, without vLLM: its configuration is looked at by its attributes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model
from engine_adapter.external.link import Identity
from engine_adapter.fingerprint import model_geometry, namespace_parts
from engine_adapter.vllm_connector.identity import KvShape, VllmIdentity, kv_dtype, shared_source
from kvstore.errors import FailedPrecondition
from kvstore.geometry import Geometry, LayerGroup
from kvstore.identity import namespace_digest

HF = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SHAPE = KvShape(
    block_tokens=16,
    geometry=Geometry(
        groups=(LayerGroup(layers=1, kv_heads=1, head_dim=64, block_tokens=16),), dtype="float8_e4m3fn"
    ),
    order="H2 N16 C32 x4",
    groups="0: 2 x FullAttentionSpec",
    parts=1,
    shared=False,
)


def model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def config(folder: object, **changes: Any) -> SimpleNamespace:
    """As vLLM's, as far as it is looked at; `changes` are named by group and attribute: model_config__seed=1."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            quantization=None,
            dtype="torch.float32",
            seed=0,
            architectures=["LlamaForCausalLM"],
            hf_config=SimpleNamespace(to_dict=lambda: dict(HF)),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    for name, value in changes.items():
        group, _, attribute = name.partition("__")
        if attribute:
            setattr(getattr(made, group), attribute, value)
        else:
            setattr(made, group, value)
    return made


def digest(made: SimpleNamespace, identity: Identity = Identity(), shape: KvShape = SHAPE) -> bytes:  # noqa: B008
    parts = VllmIdentity(made, shape, find_folder=lambda *_: None).parts(identity)
    return namespace_digest(parts)


def overridden(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: {**HF, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__quantization": "fp8"},
        {"model_config__dtype": "torch.bfloat16"},
        {"model_config__hf_config": overridden(rope_theta=20000.0)},
        {"cache_config__cache_dtype": "fp8"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"device_config__device_type": "cuda"},
        {"load_config__load_format": "dummy"},
        {"speculative_config": SimpleNamespace(method="ngram", model=None)},
    ],
)
def test_whatever_changes_the_kv_changes_the_namespace(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model(tmp_path / "m")
    assert digest(config(folder)) == digest(config(folder))
    assert digest(config(folder)) != digest(config(folder, **changes))


@pytest.mark.parametrize(
    "changes", [{"order": "N16 H2 C32 x4"}, {"groups": "0: 3 x FullAttentionSpec"}, {"block_tokens": 32}]
)
def test_so_does_the_shape_of_a_block(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model(tmp_path / "m")
    assert digest(config(folder)) != digest(config(folder), shape=replace(SHAPE, **changes))


def test_so_do_the_weights(tmp_path: Path) -> None:
    """Three folders of one name."""
    found = []
    for place, weights in (("a", b"weights"), ("b", b"weights"), ("c", b"others")):
        (tmp_path / place).mkdir()
        found.append(digest(config(model(tmp_path / place / "m", weights))))
    assert found[0] == found[1] != found[2]


def test_an_adapter_is_its_files_and_no_salt(tmp_path: Path) -> None:
    """A LoRA called as another request's salt got that request's KV, where both were one string in the key."""
    made = config(model(tmp_path / "m"))
    adapters = []
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        (folder / "adapter_config.json").write_text("{}")
        adapters.append(digest(made, Identity(adapter=(name, str(folder)))))
    plain, salted = digest(made), digest(made, Identity(salt="a"))
    assert adapters[0] == adapters[1]
    assert len({plain, salted, digest(made, Identity(salt="b")), adapters[0], adapters[2]}) == 5
    assert digest(made, Identity(epoch="1")) != plain
    assert digest(made, Identity(salt="")) != plain


def test_an_adapter_that_changes_on_disk_is_what_it_was_when_it_was_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"1")
    named = VllmIdentity(config(model(tmp_path / "m")), SHAPE, find_folder=lambda *_: None)
    before = named.parts(Identity(adapter=("a 1", str(folder))))
    (folder / "adapter_model.safetensors").write_bytes(b"2")
    assert named.parts(Identity(adapter=("a 1", str(folder)))) == before
    assert named.parts(Identity(adapter=("a 2", str(folder)))) != before


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    named = VllmIdentity(config("of/a-hub"), SHAPE, find_folder=lambda *_: None)
    with pytest.raises(FailedPrecondition, match="no files on this machine"):
        named.parts(Identity())
    with pytest.raises(FailedPrecondition, match="makes up for itself"):
        VllmIdentity(
            config(folder, cache_config__calculate_kv_scales=True), SHAPE, find_folder=lambda *_: None
        ).parts(Identity())
    with pytest.raises(FailedPrecondition, match="no folder"):
        VllmIdentity(config(folder), SHAPE, find_folder=lambda *_: None).parts(
            Identity(adapter=("x", "of/a-hub"))
        )
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FailedPrecondition, match="no weights"):
        VllmIdentity(config(empty), SHAPE, find_folder=lambda *_: None).parts(Identity())


def test_a_model_of_a_hub_is_looked_for_on_this_machine(tmp_path: Path) -> None:
    folder = model(tmp_path / "snapshot")
    named = VllmIdentity(config("of/a-hub"), SHAPE, find_folder=lambda *_: str(folder))
    assert named.parts(Identity())["model"] == b"a-hub"


def test_shared_blocks_have_the_bundled_engines_names(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    source = find_model(str(folder))
    geometry = model_geometry(source, block_tokens=16, dtype="float32")
    shape = replace(SHAPE, geometry=geometry, shared=True)
    ours = VllmIdentity(config(folder), shape, find_folder=lambda *_: None).parts(Identity())
    assert ours == namespace_parts(source, geometry, EngineSettings())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": overridden(rope_theta=20000.0)},
        {"cache_config__cache_dtype": "fp8"},
        {"parallel_config__pipeline_parallel_size": 2},
        {"load_config__load_format": "dummy"},
        {"speculative_config": SimpleNamespace(method="ngram", model=None)},
    ],
)
def test_what_is_computed_in_another_way_is_not_shared(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model(tmp_path / "m")
    assert shared_source(config(folder)) is not None
    assert shared_source(config(folder, **changes)) is None


def test_the_type_of_the_kv(tmp_path: Path) -> None:
    assert kv_dtype(config(tmp_path)) == "float32"
    assert kv_dtype(config(tmp_path, cache_config__cache_dtype="fp8_e4m3")) == "fp8_e4m3"
