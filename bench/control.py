"""What the control plane adds to the time to the first token of a long cached prompt that was asked before.

The bundled engine runs over a real daemon with a runner that computes nothing, and every block of the prompt is in HBM:
what is left of the time to the first token is taking the request in, finding its hashes (which are known: each sample
asks the same prompt), matching, acquiring and scheduling. What hashing it anew would add is measured by itself. The
prompt is a list of ints, as a tokenizer gives it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.blocks import ANSWER_S, parts
from bench.prompts import random_prompt
from bench.timing import median, sample_ms
from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.blocks.opening import open_block_manager
from engine_adapter.engine.config import ModelConfig, RopeConfig
from engine_adapter.engine.settings import EngineSettings
from kvstore.errors import KvstoreError
from kvstore.geometry import Geometry, LayerGroup
from kvstore.hash_chain import IS_COMPILED, hash_chain, hash_chain_in_python

if TYPE_CHECKING:
    import torch

    from engine_adapter.engine.engine import Engine
    from engine_adapter.engine.loader import LoadedModel
    from engine_adapter.engine.request import Chunk

__all__ = ["CONTROL_HBM_BYTES", "ControlPlane", "measure_control_plane"]

_GEOMETRY = Geometry(
    groups=(LayerGroup(layers=1, kv_heads=1, head_dim=16, block_tokens=32),), dtype="float32"
)
"""Blocks of 4 KiB: no byte of them is looked at."""
_SPARE_PAGES = 1024  # for what a session keeps in hand, and answers
CONTROL_HBM_BYTES = (131_072 // 32 + _SPARE_PAGES) * _GEOMETRY.slot_bytes
"""What the engine takes of the daemon's HBM, at most."""
_VOCABULARY = 128_256
_KEY = bytes(range(32))
_SETTLE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """Medians in milliseconds. `total_ms` is the time to the first token where nothing is computed or copied."""

    prompt_tokens: int
    total_ms: float
    hash_ms: float
    hash_python_ms: float
    compiled: bool


def measure_control_plane(socket: Path, prompt_tokens: int, samples: int) -> ControlPlane:
    """Attaches an engine to the daemon at `socket`. Imports torch.

    Raises: what attaching raises; KvstoreError where the prompt was not all cached.
    """
    prompt = random_prompt(7, prompt_tokens, _VOCABULARY)
    packed = np.array(prompt, dtype="<u4").data
    block_bytes = 4 * _GEOMETRY.block_tokens
    with open_block_manager(
        socket=socket,
        name="bench-control",
        geometry=_GEOMETRY,
        parts=parts(_GEOMETRY, "bench-control"),
        hbm_bytes=(prompt_tokens // _GEOMETRY.block_tokens + _SPARE_PAGES) * _GEOMETRY.slot_bytes,
        timeout_s=ANSWER_S,
    ) as blocks:
        from engine_adapter.engine.engine import Engine

        settings = EngineSettings(chunk_tokens=min(8192, prompt_tokens), max_running=1)
        engine = Engine(_loaded(prompt_tokens), blocks, settings, make_runner=lambda *_: _NoRunner())
        _first_token_s(engine, prompt, 0)  # fills
        _settle(blocks)
        whole = (prompt_tokens - 1) // _GEOMETRY.block_tokens * _GEOMETRY.block_tokens
        totals = [_first_token_s(engine, prompt, whole) * 1e3 for _ in range(samples + 1)][1:]
    return ControlPlane(
        prompt_tokens=prompt_tokens,
        total_ms=median(totals),
        hash_ms=median(sample_ms(lambda: hash_chain(_KEY, bytes(16), packed, block_bytes), samples)),
        hash_python_ms=median(
            sample_ms(lambda: hash_chain_in_python(_KEY, bytes(16), packed, block_bytes), samples)
        ),
        compiled=IS_COMPILED,
    )


def _settle(blocks: KvstoreBlockManager) -> None:
    """Waits for the copies of what was filled, which would share the processor with what is measured."""
    deadline = time.monotonic() + ANSWER_S
    while blocks.write_through.backlog_blocks and time.monotonic() < deadline:
        blocks.wait(_SETTLE_S)


def _first_token_s(engine: Engine, prompt: Sequence[int], cached_tokens: int) -> float:
    """Seconds from the request to its first token; what ends it comes with a second one."""
    from engine_adapter.engine.sampler import SamplingParams

    start = time.perf_counter()
    engine.add_request(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))
    outputs = engine.run()
    next(outputs)
    taken = time.perf_counter() - start
    *_, last = outputs
    assert last.stats is not None, "the last output has the statistics"
    if last.stats.cached_tokens != cached_tokens:
        raise KvstoreError(f"{last.stats.cached_tokens} of {cached_tokens} tokens were cached")
    return taken


class _NoStep:
    """A step that has computed nothing; every token is 0."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> None:
        """See LaunchedStep."""

    def tokens(self) -> list[int]:
        """See LaunchedStep."""
        return [0] * self._count

    def logits(self) -> torch.Tensor:
        """See LaunchedStep: nothing here draws from them."""
        raise NotImplementedError


class _NoRunner:
    """Takes chunks and block tables and computes nothing."""

    def prepare(self) -> None:
        """See Runner."""

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> _NoStep:  # noqa: ARG002
        """See Runner."""
        return _NoStep(sum(chunk.samples for chunk in chunks))


def _loaded(prompt_tokens: int) -> LoadedModel:
    """The smallest model of this geometry."""
    import torch

    from engine_adapter.engine.dummy import dummy_weights
    from engine_adapter.engine.loader import LoadedModel
    from engine_adapter.engine.models.llama import Llama
    from engine_adapter.engine.tokenizer import ByteTokenizer

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=_VOCABULARY,
        max_tokens=prompt_tokens + 64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tied_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_ids=(),
    )
    weights = dummy_weights(config, 0, torch.float32, "cpu")
    return LoadedModel(
        config=config,
        model=Llama(config, weights, 64),
        tokenizer=ByteTokenizer(),
        max_tokens=config.max_tokens,
    )
