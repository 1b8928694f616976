"""TensorRT-LLM's KV cache connector: `KvCacheConnectorConfig` names this module and its two classes.

TensorRT-LLM keeps its HBM and its prefix cache; the store's DRAM and what is below come behind them. Whatever the
daemon does, it goes on serving. Loads are asynchronous and stores begin behind the forward pass: no hook of a layer is
used, since a block is copied in one go. docs/tensorrt-llm.md says how to switch it on.

Written from the interface as it is public, 1.1 to 1.4; run by a stub host alone so far (tests/trtllm).
"""

from __future__ import annotations

import json
import os
from typing import Any

import tensorrt_llm
from tensorrt_llm._utils import mpi_rank, mpi_world_size

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:  # up to 1.2 it was one module
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

from engine_adapter.external.options import NOT_OF_TRTLLM, ConnectorOptions, read_options
from engine_adapter.trtllm_connector.leader import LeaderHalf
from engine_adapter.trtllm_connector.rank import RankHalf
from kvstore.errors import ConfigError

__all__ = ["OPTIONS_VARIABLE", "KvstoreScheduler", "KvstoreWorker"]

OPTIONS_VARIABLE = "KVSTORE_TRTLLM"
"""Environment of every rank: a JSON object of `ConnectorOptions`; TensorRT-LLM passes nothing on to connectors."""


class KvstoreScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """On the first rank. See the module, and TensorRT-LLM's base class for each method."""

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for options that are wrong."""
        super().__init__(llm_args)
        self._half = LeaderHalf(llm_args, _options(), tensorrt_llm.__version__, find_folder=_folder_of)

    def build_connector_meta(self, scheduler_output: Any) -> object:
        """For every rank."""
        return self._half.plan(scheduler_output)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """What will be loaded, and whether that is in the background: it is, where there is anything."""
        tokens = self._half.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The engine has taken pages."""
        self._half.allocated(request, block_ids)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:  # noqa: ARG002
        """True: the pages are in use until every rank names the request in `get_finished`."""
        return self._half.finished(request)

    def request_reset(self, request: Any) -> None:
        """The request will run again from the start, in other pages."""
        self._half.finished(request)

    def cancel_load(self, request: Any, start: int, end: int) -> None:  # noqa: ARG002
        """The engine will not use what was promised."""
        self._half.withdrawn(request)

    def shutdown(self) -> None:
        """Gives the session up."""
        self._half.close()


class KvstoreWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """On each rank. See the module, and TensorRT-LLM's base class for each method."""

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for options that are wrong."""
        super().__init__(llm_args)
        self._half = RankHalf(_options(), mpi_rank(), mpi_world_size())

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The pool, `[blocks, layers, K|V, …]`."""
        self._half.register(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:  # noqa: ARG002
        """The second cache manager takes pages chunk by chunk, so a promise could not be kept."""
        self._half.refuse(
            "KVCacheManagerV2 is not supported: set kv_cache_config.use_kv_cache_manager_v2=False"
        )

    def bind_connector_meta(self, metadata: object) -> None:
        """What this step is to do."""
        super().bind_connector_meta(metadata)
        self._half.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        """Begins loads; nobody in this step waits for them."""
        self._half.begin_loads(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a load is complete before its request is in a step."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: stores begin behind the step."""

    def wait_for_save(self, stream: Any) -> None:
        """Begins the stores of this step."""
        self._half.begin_stores(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Requests whose pages nothing copies any more: (saved, loaded)."""
        done = self._half.finished(finished_gen_req_ids, started_loading_req_ids)
        return done.saving, done.loading

    def shutdown(self) -> None:
        """Nothing is copied afterwards."""
        self._half.close()


def _options() -> ConnectorOptions:
    text = os.environ.get(OPTIONS_VARIABLE, "")
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{OPTIONS_VARIABLE} is no JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{OPTIONS_VARIABLE} is no JSON object: {text}")
    # A lookup that waits for a disk stops the whole engine, so it does not unless told.
    return read_options({"lookup_patience_s": 0.0, **given}, without=NOT_OF_TRTLLM)


def _folder_of(model: str, revision: str | None) -> str | None:
    """Where a model of the hub lies on this machine; nothing is fetched."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 (whatever the hub's package raises: it is not here)
        return None
