"""Loads a model for running: weights, tokenizer and configuration in one record. The slow part of a worker's start."""

from dataclasses import dataclass

import torch

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.device import compute_dtype
from engine_adapter.engine.dummy import dummy_weights
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource
from engine_adapter.engine.tokenizer import TextTokenizer, load_tokenizer
from engine_adapter.engine.weights import load_weights

__all__ = ["LoadedModel", "load_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything that does not depend on where KV lives; engines may share it."""

    config: ModelConfig
    model: Llama
    tokenizer: TextTokenizer
    max_tokens: int


def load_model(source: ModelSource, settings: EngineSettings) -> LoadedModel:
    """Read `source` (of `find_model`) and build the model on the settings' device, in `compute_dtype` of it.

    ModelError when it is damaged or incomplete.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    max_tokens = min(settings.max_tokens or source.config.max_tokens, source.config.max_tokens)
    device = torch.device(settings.device)
    dtype = getattr(torch, compute_dtype(settings.device))
    if source.seed is None:
        weights = load_weights(source, dtype, device)
    else:
        weights = dummy_weights(source.config, source.seed, dtype, device)
    return LoadedModel(
        config=source.config,
        model=Llama(source.config, weights, max_tokens),
        tokenizer=load_tokenizer(source),
        max_tokens=max_tokens,
    )
