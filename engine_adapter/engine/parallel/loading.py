"""Loads one shard of a model and joins its group."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.parallel.group import GroupSums, join_group
from engine_adapter.engine.parallel.shard import Shard, shard_weights
from engine_adapter.engine.parallel.shard_config import shard_config
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource

__all__ = ["LoadedShard", "load_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard:
    """`loaded` is a model of the shard's size."""

    loaded: LoadedModel
    group: GroupSums


def load_shard(
    source: ModelSource, settings: EngineSettings, shard: Shard, meeting_file: Path
) -> LoadedShard:
    """Reads the whole model on the device and keeps this shard of it. Returns when all shards have joined."""
    whole = load_model(source, settings)
    config = shard_config(source.config, shard.size)
    weights = shard_weights(whole.model.weights, source.config, shard)
    loaded = LoadedModel(
        config=config,
        model=Llama(config, weights, whole.max_tokens),
        tokenizer=whole.tokenizer,
        max_tokens=whole.max_tokens,
    )
    del whole, weights
    if settings.device != "cpu":
        torch.cuda.empty_cache()  # the whole model's matrices
    return LoadedShard(loaded=loaded, group=join_group(shard, meeting_file, torch.device(settings.device)))
