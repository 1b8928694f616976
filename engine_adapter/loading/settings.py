"""How a worker of the bundled engine decides what to load: from its settings and the shape of its model. No torch."""

from __future__ import annotations

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.loading.choice import ChoiceSettings, LoadMode
from kvstore.config import WorkerConfig
from kvstore.planning.planner import Ends

__all__ = ["attention_share", "choice_settings"]


def choice_settings(worker: WorkerConfig, settings: EngineSettings, model: ModelConfig) -> ChoiceSettings:
    """Of this worker.

    Deterministic mode keeps its chunks on a grid, and several devices load in step: both load first, then compute.
    """
    one_by_one = settings.deterministic or settings.tensor_parallel > 1
    return ChoiceSettings(
        mode=LoadMode(worker.load),
        ends=Ends.FRONT if one_by_one else Ends.BOTH,
        chunk_tokens=settings.chunk_tokens,
        attention=attention_share(model),
    )


def attention_share(model: ModelConfig) -> float:
    """What a token before it adds to the cost of a token, by operations, in shares of the cost of one without."""
    attended = 4 * model.num_heads * model.head_dim
    projections = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    weights = projections + 3 * model.hidden_size * model.intermediate_size
    return attended / (2 * weights)
