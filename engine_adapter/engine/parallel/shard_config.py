"""What a shard of a model is, and whether a model can be cut. Needs no torch: it is asked before torch is imported."""

from dataclasses import replace

from engine_adapter.engine.config import ModelConfig
from kvstore.errors import ConfigError

__all__ = ["shard_config"]


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """What a shard of this model is. ConfigError where heads or MLP cannot be shared evenly by `size`."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % size:
            raise ConfigError(f"tensor_parallel: {name} {value} cannot be shared evenly by {size}")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )
