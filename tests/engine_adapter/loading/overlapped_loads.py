"""An engine over a real service that computes behind a prefix while it is loaded from DRAM: on the CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.base import RequestId
from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.blocks.opening import StorePlan, begin_block_manager
from engine_adapter.engine.device import compute_dtype, device_name
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import load_model
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_shape
from engine_adapter.fingerprint import model_geometry, namespace_parts
from engine_adapter.loading.choice import ChoiceSettings, LoadMode
from engine_adapter.loading.layer_groups import layer_groups_of
from kvstore.errors import KvstoreError
from kvstore.geometry import Geometry
from tests.engine_adapter.engine.harness import random_tokens

BLOCK = 32
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
WAIT_S = 60


@dataclass(frozen=True)
class Sizes:
    """Of a model: a pool of `pages`, and tokens of prompts: `other` puts most of `prefix` out of it."""

    model: str
    pages: int
    prefix: int
    other: int
    new: int
    chunk_tokens: int

    def prompt(self) -> list[int]:
        """The prefix, and new tokens behind it."""
        return [*_tokens(self.prefix, 1), *_tokens(self.new, 3)]

    def geometry(self, device: str) -> Geometry:
        """Of a block."""
        source = find_shape(self.model)
        return model_geometry(source, block_tokens=BLOCK, dtype=compute_dtype(device))

    def settings(self, device: str, *, deterministic: bool) -> EngineSettings:
        """Of an engine."""
        return EngineSettings(
            device=device,
            device_name=device_name(device) if deterministic else "",
            deterministic=deterministic,
            overlap=1 if device != "cpu" and not deterministic else 0,
            chunk_tokens=self.chunk_tokens,
            max_tokens=self.pages * BLOCK,
            threads=1,
        )


SMALL = Sizes(model="llama-tiny", pages=40, prefix=512, other=1024, new=128, chunk_tokens=512)
LARGE = Sizes(model="llama-3.2-1b", pages=320, prefix=4096, other=8192, new=1024, chunk_tokens=8192)
"""On a GPU the load takes milliseconds, several times as long as the first layers of the step."""


@dataclass(frozen=True)
class Found:
    """What the prefix with new tokens behind it was answered with."""

    token_ids: tuple[int, ...]
    by_tier: Mapping[str, int]
    groups: list[int]
    """Of each load that began."""


class _Watched:
    """A rule that remembers what it chose. Everything pays that can."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self._rule = layer_groups_of(
            sizes.geometry(device), chunk_tokens=sizes.chunk_tokens, least_tokens=64, least_bytes=16 << 10
        )
        self.layers = self._rule.layers
        self.chosen: list[int] = []

    def choose(self, *, blocks: int, cached_tokens: int, num_tokens: int, **_speeds: object) -> int:
        groups = self._rule.choose(blocks=blocks, cached_tokens=cached_tokens, num_tokens=num_tokens)
        self.chosen.append(groups)
        return groups


def cold(sizes: Sizes, settings: EngineSettings) -> tuple[int, ...]:
    """Without a store."""
    blocks = PlainBlockManager(
        num_pages=sizes.pages,
        page_bytes=sizes.geometry(settings.device).slot_bytes,
        block_tokens=BLOCK,
        device=settings.device,
    )
    engine = Engine(load_model(find_shape(sizes.model), settings), blocks, settings)
    return engine.generate([sizes.prompt()], PARAMS)[0].token_ids


def behind_a_load(store: Path, sizes: Sizes, settings: EngineSettings, *, name: str, grouped: bool) -> Found:
    """In a namespace of its own. Else the load is awaited as a whole."""
    with begin_block_manager(_plan(store, sizes, settings, name)) as pending:
        blocks = pending.result()
        engine = Engine(load_model(find_shape(sizes.model), settings), blocks, settings)
        _put_out(engine, blocks, sizes)
        watched = _Watched(sizes, settings.device)
        blocks.layer_groups = watched if grouped else None  # type: ignore[assignment]
        (answer,) = engine.generate([sizes.prompt()], PARAMS)
        _settle(engine, blocks)
    return Found(answer.token_ids, answer.stats.cached_by_tier, watched.chosen)


@dataclass(frozen=True)
class BrokenOff:
    """What came of a request whose load does not come in time, and of others."""

    error: KvstoreError | None
    beside: tuple[int, ...]
    """Answer to another prompt, computed while the load is under way; `afterwards` is that from its cached blocks."""
    afterwards: tuple[int, ...]
    again: tuple[int, ...]
    """Answer to the same prompt afterwards."""


def broken_off(
    store: Path, sizes: Sizes, settings: EngineSettings, *, name: str, come: Callable[[], None]
) -> BrokenOff:
    """As `behind_a_load`, grouped; loads are held up until `come` is called."""
    with begin_block_manager(_plan(store, sizes, settings, name)) as pending:
        blocks = pending.result()
        engine = Engine(load_model(find_shape(sizes.model), settings), blocks, settings)
        _put_out(engine, blocks, sizes)
        blocks.layer_groups = _Watched(sizes, settings.device)  # type: ignore[assignment]
        engine.add_request(sizes.prompt(), PARAMS, RequestId("late"))
        outputs = list(engine.run())
        other = _tokens(200, 4)
        (beside,) = engine.generate([other], PARAMS)
        come()
        _settle(engine, blocks)
        (afterwards,) = engine.generate([other], PARAMS)
        (again,) = engine.generate([sizes.prompt()], PARAMS)
    return BrokenOff(outputs[-1].error, beside.token_ids, afterwards.token_ids, again.token_ids)


def failed_load(
    store: Path, sizes: Sizes, settings: EngineSettings, *, name: str, grouped: bool
) -> tuple[KvstoreError | None, float]:
    """As `behind_a_load`, where no load comes: how the request ends, and after how many seconds."""
    with begin_block_manager(_plan(store, sizes, settings, name)) as pending:
        blocks = pending.result()
        engine = Engine(load_model(find_shape(sizes.model), settings), blocks, settings)
        _put_out(engine, blocks, sizes)
        blocks.layer_groups = _Watched(sizes, settings.device) if grouped else None  # type: ignore[assignment]
        engine.add_request(sizes.prompt(), PARAMS)
        began = time.monotonic()
        (*_, last) = engine.run()
        return last.error, time.monotonic() - began


def _plan(store: Path, sizes: Sizes, settings: EngineSettings, name: str) -> StorePlan:
    source, geometry = find_shape(sizes.model), sizes.geometry(settings.device)
    return StorePlan(
        socket=store,
        name=name,
        geometry=geometry,
        parts={**namespace_parts(source, geometry, settings), "tenant": name.encode()},
        hbm_bytes=sizes.pages * geometry.slot_bytes,
        device=settings.device,
        loads=ChoiceSettings(mode=LoadMode.ALWAYS, chunk_tokens=sizes.chunk_tokens),
    )


def _put_out(engine: Engine, blocks: KvstoreBlockManager, sizes: Sizes) -> None:
    """The prefix is computed, and another prompt then puts it out of HBM."""
    for tokens in (_tokens(sizes.prefix, 1), _tokens(sizes.other, 2)):
        engine.generate([[*tokens, 0]], PARAMS)
        _settle(engine, blocks)


def _tokens(count: int, seed: int) -> list[int]:
    return random_tokens(count, seed=seed, vocab=500)


def _settle(engine: Engine, blocks: KvstoreBlockManager) -> None:
    """Everything that was computed is in DRAM too."""
    session, deadline = blocks._session, time.monotonic() + WAIT_S
    while blocks.write_through.backlog_blocks or not session.quiet():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.002)
    assert session.drain(WAIT_S)
