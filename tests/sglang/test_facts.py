"""What the connector reads of SGLang's own settings: each by the name that SGLang has for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sglang import standins

if not standins.is_installed():
    pytest.skip("needs SGLang: make test-sglang", allow_module_level=True)

import sglang.srt.runtime_context
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.server_args import ServerArgs

from engine_adapter.sglang_connector.identity import namespace_parts
from kvstore.identity import namespace_digest
from tests.sglang.rank import Rank, mha_pool
from tests.support.daemon import Service

pytestmark = pytest.mark.engine

SETTINGS = {
    "model_path": None,
    "revision": None,
    "kv_cache_dtype": "auto",
    "quantization": None,
    "lora_paths": None,
    "dtype": "auto",
    "json_model_override_args": "{}",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}


def facts(monkeypatch: pytest.MonkeyPatch, **settings: object) -> object:
    from engine_adapter.sglang_connector.facts import facts_of

    args = SimpleNamespace(**{**SETTINGS, **settings})
    monkeypatch.setattr(sglang.srt.runtime_context, "get_server_args", lambda: args)
    pool = mha_pool("page_first")
    with Rank("/nowhere", pool) as rank:
        return facts_of(rank.config, pool, 100)


def test_sglang_has_these_settings_under_these_names() -> None:
    """A setting that was renamed would silently be the same for all."""
    assert set(SETTINGS) <= set(ServerArgs.__struct_fields__)
    assert {"lora_name", "lora_path"} <= set(LoRARef.__struct_fields__)


def test_each_setting_sets_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    base = {"model_path": str(tmp_path)}
    first = namespace_digest(namespace_parts(facts(monkeypatch, **base), None))
    assert first == namespace_digest(namespace_parts(facts(monkeypatch, **base), None))
    lora = LoRARef(lora_name="a", lora_path=str(tmp_path))
    for change in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"lora_paths": [lora]},
        {"dtype": "float16"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"speculative_draft_model_path": "/draft"},
    ):
        assert namespace_digest(namespace_parts(facts(monkeypatch, **base, **change), None)) != first


def test_a_model_in_a_folder_needs_no_name_for_its_weights(
    monkeypatch: pytest.MonkeyPatch, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    args = SimpleNamespace(**{**SETTINGS, "model_path": str(tmp_path)})
    monkeypatch.setattr(sglang.srt.runtime_context, "get_server_args", lambda: args)
    with Rank(service.socket, mha_pool("page_first"), weights=None) as rank:
        rank.await_store()
