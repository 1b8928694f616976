"""TensorRT-LLM's connector interface as its public source has it: names and parameters, and classes to stand in for it.

Ours, by contract: nothing of TensorRT-LLM is installed. What is stated was read in NVIDIA/TensorRT-LLM at commits
00fdcbf (1.1, `_torch/pyexecutor/kv_cache_connector.py`) and 035ab91 (1.4, `…/connectors/kv_cache_connector.py`).
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RANK", "SCHEDULER", "WORKER", "WORLD", "RequestData", "SchedulerOutput", "install"]

WORKER: dict[str, tuple[str, ...]] = {
    "register_kv_caches": ("kv_cache_tensor",),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "save_kv_layer": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
    # not abstract
    "bind_connector_meta": ("metadata",),
    "register_kv_cache_layout": ("layout",),
}
SCHEDULER: dict[str, tuple[str, ...]] = {
    "build_connector_meta": ("scheduler_output",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "request_finished": ("request", "cache_block_ids"),
    "update_state_after_alloc": ("request", "block_ids"),
    # not abstract, and called of 1.4 alone
    "request_reset": ("request",),
    "cancel_load": ("request", "start", "end"),
}
"""Parameters behind `self`, in order."""

RANK: ContextVar[int] = ContextVar("rank", default=0)
WORLD: ContextVar[int] = ContextVar("world", default=1)
"""Of the rank whose connector is being made, as MPI would say."""


@dataclass
class RequestData:
    """Of one request in a step; what 1.1 has of it."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    """Of a step."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


def _abstract(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    def stand_in(self: Any, *args: object) -> Any:
        raise NotImplementedError(name)

    stand_in.__name__ = name
    kinds = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in ("self", *parameters)]
    stand_in.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    return abstractmethod(stand_in)


class _Base(ABC):  # noqa: B024 (its subclasses are)
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None


def _worker() -> type:
    concrete = ("bind_connector_meta", "register_kv_cache_layout")
    made = {name: _abstract(name, parameters) for name, parameters in WORKER.items() if name not in concrete}

    def bind_connector_meta(self: Any, metadata: object) -> None:
        self._metadata = metadata

    return type("KvCacheConnectorWorker", (_Base,), {**made, "bind_connector_meta": bind_connector_meta})


def _scheduler() -> type:
    concrete = ("request_reset", "cancel_load")
    made = {
        name: _abstract(name, parameters) for name, parameters in SCHEDULER.items() if name not in concrete
    }
    return type("KvCacheConnectorScheduler", (_Base,), made)


def install() -> None:
    """Modules under TensorRT-LLM's names, as far as the connector imports them."""
    if "tensorrt_llm" in sys.modules:
        return
    interface = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
    parts = interface.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules["tensorrt_llm"].__version__ = "1.4.0"  # type: ignore[attr-defined]
    utils = types.ModuleType("tensorrt_llm._utils")
    utils.mpi_rank, utils.mpi_world_size = RANK.get, WORLD.get  # type: ignore[attr-defined]
    sys.modules[utils.__name__] = sys.modules["tensorrt_llm"]._utils = utils  # type: ignore[attr-defined]
    module = sys.modules[interface]
    module.KvCacheConnectorWorker = _worker()  # type: ignore[attr-defined]
    module.KvCacheConnectorScheduler = _scheduler()  # type: ignore[attr-defined]
