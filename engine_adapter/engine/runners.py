"""Chooses the runner for a model, its device and its settings. The only place that knows all of them."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.flashinfer_limits import flashinfer_lacks
from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.attention.tiled import TiledAttention
from engine_adapter.engine.cuda_runner import CudaRunner
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.models.fused import Elementwise, FusedLlama, TorchElementwise
from engine_adapter.engine.parallel.group import GroupSums
from engine_adapter.engine.passes import Passes, TorchPasses
from engine_adapter.engine.request import Chunk
from engine_adapter.engine.runner import FlatRunner, LaunchedStep, Runner, TiledRunner
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.streams import CudaQueue, HostQueue
from kvstore.errors import ConfigError

__all__ = ["make_runner", "make_shard_runner", "max_pages"]

_LOG = logging.getLogger("kvstore.worker")


def make_runner(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    """A runner of `loaded` over `pool` `[page, layer, K|V, kv_head, token, head_dim]`.

    ConfigError when the pages do not nest with deterministic mode's grid, or the kernels cannot read them, or
    FlashInfer is wanted and not installed.
    """
    if pool.is_cuda:
        make = _deterministic_cuda_runner if settings.deterministic else _cuda_runner
        return make(loaded, pool, settings)
    if settings.deterministic:
        return TiledRunner(loaded.model, TiledAttention(pool))
    return FlatRunner(loaded.model, SdpaAttention(pool))


def make_shard_runner(
    loaded: LoadedModel, pool: Tensor, settings: EngineSettings, group: GroupSums
) -> CudaRunner:
    """The same for one shard of a model in a group. ConfigError in deterministic mode."""
    if settings.deterministic:
        raise ConfigError("deterministic mode runs on one device: leave tensor_parallel at 1")
    if pool.is_cuda:
        return _cuda_runner(loaded, pool, settings, group)
    return CudaRunner(
        FusedLlama(loaded.model, TorchElementwise(), group.reduce),
        TorchPasses(loaded.model, pool),
        HostQueue(),
        settings,
        max_pages=max_pages(loaded, pool),
        agree=group.agree,
    )


def _cuda_runner(
    loaded: LoadedModel,
    pool: Tensor,
    settings: EngineSettings,
    group: GroupSums | None = None,
) -> CudaRunner:
    queue = CudaQueue(pool.device)
    return CudaRunner(
        FusedLlama(loaded.model, _triton_elementwise(), None if group is None else group.reduce),
        _cuda_passes(loaded, pool, settings, queue),
        queue,
        settings,
        max_pages=max_pages(loaded, pool),
        agree=None if group is None else group.agree,
    )


def _cuda_passes(loaded: LoadedModel, pool: Tensor, settings: EngineSettings, queue: CudaQueue) -> Passes:
    # Here, because triton is imported there, which CPU builds of torch come without.
    from engine_adapter.engine.triton_passes import FlashInferPasses, TritonPasses

    rows, sequences = settings.chunk_tokens + settings.max_running, settings.max_running
    if settings.attention == "flashinfer":
        lack = flashinfer_lacks(pool.shape[5], pool.dtype)
        if not lack:
            pages = max_pages(loaded, pool)
            return FlashInferPasses(
                loaded.model, pool, queue, max_rows=rows, max_sequences=sequences, max_pages=pages
            )
        _LOG.warning("worker.attention: not flashinfer but triton: %s", lack)
    return TritonPasses(loaded.model, pool, max_rows=rows, max_sequences=sequences)


def _triton_elementwise() -> Elementwise:
    from engine_adapter.engine.triton_passes import TritonElementwise

    return TritonElementwise()


def _deterministic_cuda_runner(loaded: LoadedModel, pool: Tensor, _settings: EngineSettings) -> Runner:
    from engine_adapter.engine.attention.triton_fixed import FixedTritonAttention

    runner = TiledRunner(loaded.model, FixedTritonAttention(pool, loaded.config.num_heads))
    return _OnDevice(runner, pool.device)


class _OnDevice:
    """Makes a GPU the current one, as its kernels want, around a runner that does not."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    def prepare(self) -> None:
        with torch.cuda.device(self._device):
            self._runner.prepare()

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        with torch.cuda.device(self._device):
            return self._runner.launch(chunks, tables)


def max_pages(loaded: LoadedModel, pool: Tensor) -> int:
    """The most pages of one request, with one token that is dropped at its end."""
    block_tokens = pool.shape[4]
    return min(pool.shape[0], -(-(loaded.max_tokens + 1) // block_tokens))
