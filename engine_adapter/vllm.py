"""vLLM's KV connector: `--kv-transfer-config` names this module and `KvstoreConnector` (`kvstore vllm-args` prints it).

The object exists twice: in the process that schedules, which looks up and makes all calls to the daemon, and in each
rank, which copies. vLLM keeps its HBM and its prefix cache; the store's DRAM and what is below come behind them.
Whatever the daemon does, vLLM goes on serving: without it there is no cache, and it is picked up again when it is back.

Written for vLLM 0.32 and 0.33. Loads are asynchronous and begin behind the forward pass, stores begin when it is done;
no hook of a layer is used, since a block is copied in one go and nobody waits for a part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapter.external.jobs import StepPlan
from engine_adapter.external.options import NOT_OF_VLLM, read_options
from engine_adapter.external.scheduling import Scheduling
from engine_adapter.vllm_connector.messages import RankSaid, StepMetadata, StepWorkerMetadata
from engine_adapter.vllm_connector.pages import attention_groups, require_supported
from engine_adapter.vllm_connector.rank import RankHalf
from engine_adapter.vllm_connector.scheduler import SchedulerHalf
from kvstore.errors import KvstoreError

__all__ = ["KvstoreConnector"]

_LOG = logging.getLogger("vllm.kvstore")


class KvstoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module, and vLLM's base class for each method."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for options that are wrong. A model that cannot be cached is served without the store."""
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(self._kv_transfer_config.kv_connector_extra_config, without=NOT_OF_VLLM)
        self._half: SchedulerHalf | None = None
        self._rank: RankHalf | None = None
        try:
            require_supported(vllm_config)
            groups = attention_groups(kv_cache_config)
        except KvstoreError as error:
            _LOG.warning("kvstore: %s: vLLM serves without the store", error)
            return
        if role == KVConnectorRole.SCHEDULER:
            self._half = SchedulerHalf(vllm_config, kv_cache_config, groups, options)
        else:
            self._rank = RankHalf(vllm_config, kv_cache_config, groups, options)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003 (vLLM's signature)
        """Block-major where there is a choice: a block of all layers is then one piece."""
        return None if current_platform.is_cpu() else "BLHNC"

    def shutdown(self) -> None:
        """Of either role: nothing is copied afterwards, and the session is given up."""
        if self._rank is not None:
            self._rank.close()
        if self._half is not None:
            self._half.close()

    # ------------------------------------------------------------ ranks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV is there."""
        if self._rank is not None:
            self._rank.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Of vLLM 0.33: it sleeps, and the KV's memory goes. Nothing of it is registered here, but copies end."""
        if self._rank is not None:
            self._rank.rest()

    def restore_kv_caches(self) -> None:
        """Nothing: the tensors are where they were, and what was in them vLLM has forgotten."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where this rank listens, and what its KV is like."""
        return None if self._rank is None else self._rank.said

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before a step computes: stores end whose pages it may overwrite."""
        if self._rank is not None:
            self._rank.before_step(_plan_of(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 (vLLM's signature)
        """Begins loads; nobody in this step waits for them."""
        if self._rank is not None:
            self._rank.begin_loads(_plan_of(self._connector_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a load is complete before its request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: stores begin when the step is done."""

    def wait_for_save(self) -> None:
        """Begins the stores of this step."""
        if self._rank is not None:
            self._rank.begin_stores(_plan_of(self._connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 (as above)
        """What has ended. The plan says which requests end; vLLM's set of them is not needed."""
        return KVConnectorTransferResults() if self._rank is None else self._rank.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that a load has not filled."""
        return set() if self._rank is None else self._rank.take_failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Jobs that have ended."""
        report = None if self._rank is None else self._rank.report()
        return None if report is None else StepWorkerMetadata(report)

    # ------------------------------------------------------------ the process that schedules

    @property
    def _scheduling(self) -> Scheduling | None:
        return None if self._half is None else self._half.scheduling

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The ranks of one pipeline stage have said what their KV is like."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): said for rank, said in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All ranks have said what their KV is like: attaches, in the background."""
        if self._half is not None:
            said = [metadata[place] for place in sorted(metadata)]
            self._half.begin([rank for rank in said if isinstance(rank, RankSaid)])

    def on_new_request(self, request: Any) -> None:
        """Hashes the prompt and has what only a disk has of it read ahead."""
        if self._half is not None:
            self._half.new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """From the tables that are mapped here; None while blocks are being read from a disk."""
        if (scheduling := self._scheduling) is None:
            return 0, False
        found = scheduling.matched(request.request_id, request.num_tokens, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The acquire goes out."""
        if self._half is not None and (scheduling := self._scheduling) is not None:
            ids = self._half.block_ids(blocks.get_block_ids()) if num_external_tokens else ()
            scheduling.allocated(request.request_id, ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Tokens from DRAM, and from a disk, read ahead or not."""
        if (scheduling := self._scheduling) is None:
            return {}
        host, disk = scheduling.sources(request.request_id, num_external_tokens)
        found = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the ranks are to do in this step."""
        return StepMetadata(StepPlan() if self._half is None else self._half.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks have done: stored blocks are sealed, slots go back."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, StepWorkerMetadata) and (scheduling := self._scheduling) is not None:
            scheduling.report(said.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: stores still read the request's pages."""
        return self._half is not None and self._half.ended(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM has to go on stepping: copies end, and are sealed, behind the last request."""
        return (scheduling := self._scheduling) is not None and scheduling.busy

    def take_events(self) -> Iterable[Any]:
        """Of blocks that were stored."""
        return () if (scheduling := self._scheduling) is None else scheduling.take_events()

    def reset_cache(self) -> bool | None:
        """Weights have changed, or all is to be forgotten: from now on blocks have another epoch."""
        if (scheduling := self._scheduling) is not None:
            scheduling.reset()
        return True


def _plan_of(metadata: KVConnectorMetadata | None) -> StepPlan:
    return metadata.plan if isinstance(metadata, StepMetadata) else StepPlan()
