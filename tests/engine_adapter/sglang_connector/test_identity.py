"""What tells KV of SGLang apart, and the connector's settings; without SGLang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine_adapter.sglang_connector.identity import HiCacheFacts, HiCacheOptions, namespace_parts, options_of
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.identity import namespace_digest

FACTS = HiCacheFacts(
    version="0.5.23",
    model="m",
    folder=None,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    quantization="None",
    overrides="{}",
    adapters=(),
    page_tokens=64,
    page_bytes=1 << 20,
    pool="MHATokenToKVPoolHost page_first layers 0-32",
    replicated=False,
    tp_rank=0,
    tp_size=2,
    pp_rank=0,
    pp_size=1,
    cp_rank=0,
    cp_size=1,
)


def digest(facts: HiCacheFacts, weights: str | None = "w") -> bytes:
    return namespace_digest(namespace_parts(facts, weights))


def folder(path: Path, files: dict[str, bytes]) -> str:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.5.24"},
        {"model": "n"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"overrides": '{"rope": 1}'},
        {"page_tokens": 32},
        {"page_bytes": 1 << 19},
        {"pool": "MHATokenToKVPoolHost layer_first layers 0-32"},
        {"replicated": True},
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_rank": 1},
        {"pp_size": 2},
        {"cp_rank": 1},
        {"cp_size": 2},
    ],
)
def test_whatever_differs_sets_apart(change: dict[str, object]) -> None:
    assert digest(replace(FACTS, **change)) != digest(FACTS)  # type: ignore[arg-type]


def test_ranks_with_the_same_kv_share_it() -> None:
    latent = replace(FACTS, replicated=True)
    assert digest(latent) == digest(replace(latent, tp_rank=1)) == digest(replace(latent, tp_size=8))


def test_weights_are_told_by_their_files_or_by_a_name(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"model.safetensors": b"1", "config.json": b"{}"})
    two = folder(tmp_path / "two", {"model.safetensors": b"2", "config.json": b"{}"})
    first, second = (digest(replace(FACTS, folder=path), None) for path in (one, two))
    assert first != second
    assert digest(replace(FACTS, folder=one), "named") == digest(FACTS, "named") != first
    with pytest.raises(InvalidArgument, match="name them"):
        namespace_parts(FACTS, None)
    with pytest.raises(InvalidArgument, match="name them"):
        namespace_parts(replace(FACTS, folder=str(tmp_path / "none")), None)


def test_weights_in_another_format_count_too(tmp_path: Path) -> None:
    """Of a folder without safetensors only the configuration was read, and two models had one name."""
    one = folder(tmp_path / "one", {"pytorch_model.bin": b"1", "config.json": b"{}"})
    two = folder(tmp_path / "two", {"pytorch_model.bin": b"2", "config.json": b"{}"})
    assert digest(replace(FACTS, folder=one), None) != digest(replace(FACTS, folder=two), None)


def test_new_weights_of_an_adapter_set_apart(tmp_path: Path) -> None:
    """SGLang names an adapter that it starts with by name and path: other weights there were taken for the old ones."""
    files = {"adapter_model.safetensors": b"1", "adapter_config.json": b'{"lora_alpha": 16}'}
    path = folder(tmp_path / "lora", files)
    facts = replace(FACTS, adapters=(("a", path),))
    first = digest(facts)
    assert first == digest(facts) != digest(FACTS)
    assert digest(replace(FACTS, adapters=(("b", path),))) != first
    folder(tmp_path / "lora", {"adapter_config.json": b'{"lora_alpha": 32}'})
    assert digest(facts) != first
    folder(tmp_path / "lora", {**files, "adapter_model.safetensors": b"2"})
    assert digest(facts) != first


def test_an_adapter_whose_files_are_not_known_is_new_at_each_start() -> None:
    unknown = replace(FACTS, adapters=(("a", None),))
    assert digest(unknown) != digest(unknown)


def test_settings_are_those_of_one_object() -> None:
    assert options_of(None) == options_of({"backend_name": "kvstore"}) == HiCacheOptions()
    given = {
        "socket": "/run/kv.sock",
        "weights": "m@1",
        "load_s": 3,
        "store_s": 0.5,
        "cache": "dry-run",
        "tenant": "alice",
    }
    assert options_of({"kvstore": given}) == HiCacheOptions(
        socket="/run/kv.sock", weights="m@1", load_s=3, store_s=0.5, cache="dry-run", tenant="alice"
    )


@pytest.mark.parametrize(
    "given,message",
    [
        ([], "is an object"),
        ({"sock": "x"}, "no setting 'sock'"),
        ({"socket": 5}, "socket is a text"),
        ({"weights": ""}, "weights is a text"),
        ({"cache": "half"}, "cache must be one of on, read"),
        ({"tenant": 1}, "tenant is a text"),
        ({"load_s": True}, "load_s is a number"),
        ({"store_s": 61}, "from 0 to 60"),
        ({"load_s": "2"}, "load_s is a number"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of({"kvstore": given})
