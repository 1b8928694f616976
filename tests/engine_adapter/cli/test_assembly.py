"""Engines put together from the configuration."""

import sys
from pathlib import Path

import pytest

from engine_adapter.cli.assembly import EngineOptions, engine_settings, open_engine
from engine_adapter.engine.sampler import SamplingParams
from kvstore.cli.settings import load_settings
from kvstore.errors import ConfigError

DUMMY = {
    "worker.load_format": "dummy",
    "worker.model": "llama-tiny",
    "worker.hbm": "8MiB",
    "worker.threads": "1",
}


def options(store: Path | None = None, **flags: str) -> EngineOptions:
    config = load_settings({**DUMMY, **{f"worker.{name}": value for name, value in flags.items()}}).config
    return EngineOptions(worker=config.worker, store=store, deterministic=False, timeout_s=1.0)


def answer(chosen: EngineOptions) -> tuple[int, ...]:
    told: list[str] = []
    with open_engine(chosen, told.append) as engine:
        (completion,) = engine.generate([list(range(90))], SamplingParams(max_new_tokens=8))
    assert told[0] == "loading torch"
    assert told[-1] == "warming up"
    return completion.token_ids


def test_two_devices_answer_as_one_does() -> None:
    assert answer(options()) == answer(options(tensor_parallel="2"))


def test_what_the_device_decides() -> None:
    settings = engine_settings(options().worker, deterministic=False)
    assert (settings.device, settings.overlap, settings.chunk_tokens) == ("cpu", 0, 512)
    assert engine_settings(options(chunk_tokens="64").worker, deterministic=True).chunk_tokens == 64


def test_memory_that_holds_no_block_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="holds not even one block"),
        open_engine(options(hbm="1MiB", block_tokens="1024"), lambda _: None),
    ):
        pass


def test_heads_that_cannot_be_shared_are_refused_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """That eight heads do not go into three shards was said only after torch had been imported, for seconds."""
    monkeypatch.setitem(sys.modules, "torch", None)  # whoever imports it now fails otherwise
    told: list[str] = []
    with (
        pytest.raises(ConfigError, match="num_heads 8 cannot be shared evenly by 3"),
        open_engine(options(tensor_parallel="3"), told.append),
    ):
        pass
    assert not told
