"""An engine of random weights in this process, over pages that a benchmark filled itself: no daemon, no cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.filled import FilledBlocks, filled_pool
from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.device import compute_dtype, resolve_device
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_shape
from kvstore.errors import ConfigError, ResourceExhausted

if TYPE_CHECKING:
    import torch

    from engine_adapter.engine.engine import Engine
    from engine_adapter.engine.loader import LoadedModel

__all__ = ["BenchEngine", "EnginePlan", "attending_by", "default_model", "open_bench_engine"]

_KEPT_FREE_BYTES = 6 << 30  # for activations and graphs, which are made after the pages
_CPU_POOL_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Which model and how it runs. `cached_tokens` and `filled_tokens` are those of all requests at one time."""

    model: str
    device: str
    """As `--device` takes it."""
    block_tokens: int
    chunk_tokens: int
    max_running: int
    cached_tokens: int
    filled_tokens: int
    attention: str = "triton"
    """Who computes it on a GPU: `triton` or `flashinfer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchEngine:
    """A ready engine. `cached_pages` may be fewer than were wished for: requests then share them."""

    engine: Engine
    settings: EngineSettings
    blocks: FilledBlocks
    config: ModelConfig
    device: torch.device
    itemsize: int
    cached_pages: int


def default_model(device: str) -> str:
    """The shape that figures are stated for on a GPU, and a tiny one that a CPU runs in milliseconds."""
    return "llama-3.1-8b" if resolve_device(device).startswith("cuda") else "llama-tiny"


def open_bench_engine(plan: EnginePlan, say: Callable[[str], None]) -> BenchEngine:
    """Draws weights and pages. Raises: ModelError, ConfigError; ResourceExhausted where not one context fits."""
    import torch

    from engine_adapter.engine.loader import load_model

    device = resolve_device(plan.device)
    source = find_shape(plan.model)
    _check_attention(plan.attention, device, source.config)
    settings = EngineSettings(
        device=device,
        attention=plan.attention,
        overlap=int(device != "cpu"),
        chunk_tokens=plan.chunk_tokens,
        max_running=plan.max_running,
    )
    say(f"{plan.model}: drawing weights")
    loaded = load_model(source, settings)
    dtype = getattr(torch, compute_dtype(device))
    page_bytes = source.config.page_bytes(plan.block_tokens, dtype.itemsize)
    filled = -(-plan.filled_tokens // plan.block_tokens) + 2 * plan.max_running
    cached = _pages_that_fit(plan, device, page_bytes, filled)
    say(f"{plan.model}: drawing {filled + cached:,} pages")
    pool = filled_pool(filled + cached, page_bytes, dtype, torch.device(device))
    blocks = FilledBlocks(pool, plan.block_tokens, cached_pages=cached)
    say(f"{plan.model}: preparing")
    return BenchEngine(
        engine=_engine(loaded, blocks, settings),
        settings=settings,
        blocks=blocks,
        config=source.config,
        device=torch.device(device),
        itemsize=dtype.itemsize,
        cached_pages=cached,
    )


def attending_by(setup: BenchEngine, attention: str) -> BenchEngine:
    """Another engine over the same weights and pages, whose attention is computed by `attention`.

    One of the two runs at a time. Raises: ConfigError where `attention` cannot compute it here.
    """
    settings = replace(setup.settings, attention=attention)
    _check_attention(attention, settings.device, setup.config)
    return replace(setup, engine=_engine(setup.engine.loaded, setup.blocks, settings), settings=settings)


def _engine(loaded: LoadedModel, blocks: FilledBlocks, settings: EngineSettings) -> Engine:
    from engine_adapter.engine.engine import Engine

    engine = Engine(loaded, blocks, settings)
    engine.prepare()
    return engine


def _check_attention(attention: str, device: str, config: ModelConfig) -> None:
    """An engine would go on with what it has; a figure must be of what it says. Raises: ConfigError."""
    import torch

    from engine_adapter.engine.attention.flashinfer_limits import flashinfer_lacks

    if attention != "flashinfer":
        return
    if device == "cpu":
        raise ConfigError("--attention: flashinfer needs a CUDA device")
    lack = flashinfer_lacks(config.head_dim, getattr(torch, compute_dtype(device)))
    if lack:
        raise ConfigError(f"--attention: not flashinfer: {lack}")


def _pages_that_fit(plan: EnginePlan, device: str, page_bytes: int, filled: int) -> int:
    """Pages for what is cached: as many as are wished for, or as memory has."""
    import torch

    wished = -(-plan.cached_tokens // plan.block_tokens)
    if device == "cpu":
        free = _CPU_POOL_BYTES
    else:
        torch.cuda.empty_cache()
        free = int(torch.cuda.mem_get_info(device)[0]) - _KEPT_FREE_BYTES
    room = free // page_bytes - filled
    if room < min(wished, 1):
        raise ResourceExhausted(f"{plan.model}: {free:,} bytes are free, not enough for {filled:,} pages")
    return min(wished, room)
