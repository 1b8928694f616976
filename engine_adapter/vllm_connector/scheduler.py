"""The half of vLLM's connector in the process that schedules: from vLLM's requests and steps to `external.scheduling`.

Attaches in the background once every rank has said what its KV is like. The scheduler's thread calls; nothing waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_adapter.base import Ending
from engine_adapter.endings import ending_of, tool_tokens_in
from engine_adapter.external.chain import Item
from engine_adapter.external.jobs import StepPlan
from engine_adapter.external.link import Identity, LinkPlan, StoreLink
from engine_adapter.external.options import ConnectorOptions, cache_use
from engine_adapter.external.pages import part_bytes
from engine_adapter.external.ranks import RankGroup
from engine_adapter.external.request import RequestFacts
from engine_adapter.external.scheduling import Scheduling, SchedulingRules
from engine_adapter.vllm_connector.identity import KvShape, VllmIdentity, kv_dtype, shared_source
from engine_adapter.vllm_connector.messages import RankSaid
from engine_adapter.vllm_connector.pages import CacheGroups
from kvstore.geometry import Geometry, LayerGroup

__all__ = ["SchedulerHalf"]

_LOG = logging.getLogger("vllm.kvstore")
_CLOSE_S = 10.0
_MIN_ROOM_BLOCKS, _MAX_ROOM_BLOCKS = 16, 1024


class SchedulerHalf:
    """In the process that schedules. Its scheduling begins when the ranks have said what their KV is like."""

    def __init__(
        self, config: Any, kv_cache_config: Any, groups: CacheGroups, options: ConnectorOptions
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._groups = groups
        self._options = options
        self._link: StoreLink | None = None
        events = config.kv_events_config
        self._wants_events = events is not None and events.enable_kv_cache_events
        self.scheduling: Scheduling | None = None
        self._tools: frozenset[int] = frozenset()

    def begin(self, ranks: list[RankSaid]) -> None:
        """Attaches in the background."""
        world = self._config.parallel_config.world_size
        why_not = next((rank.why_not for rank in ranks if rank.why_not), "")
        alike = {(rank.order, rank.shared, rank.payload_bytes) for rank in ranks}
        if not why_not and (len(ranks) != world or len(alike) != 1):
            why_not = (
                f"{len(ranks)} of {world} ranks are here, or their parts of a block differ in size or layout"
            )
        if why_not:
            _LOG.warning("kvstore: %s: vLLM serves without the store", why_not)
            return
        shape = _shape(self._config, self._kv_cache_config, self._groups, ranks[0], world)
        identity = VllmIdentity(self._config, shape, find_folder=_folder_of)
        model = self._config.model_config.model
        self._tools = _tool_tokens(self._config.model_config)
        self._link = StoreLink(
            LinkPlan(
                socket=self._options.socket or None,
                name=self._options.name or f"vllm {Path(str(model)).name}",
                timeout_s=self._options.timeout_s,
                geometry=shape.geometry,
                group=RankGroup([rank.listener for rank in ranks], timeout_s=self._options.timeout_s),
                room_blocks=self._options.room_blocks or self._room_blocks(),
                parts=identity.parts,
                breaker_s=self._options.breaker_s,
                return_s=self._options.return_patience_s,
                use=cache_use(self._options.cache),
                tenant=self._options.tenant,
            )
        )
        rules = SchedulingRules(
            block_tokens=self._groups.block_tokens,
            ranks=world,
            lookup_s=self._options.lookup_patience_s,
            load_s=self._options.load_patience_s,
            promise_disk=self._config.kv_transfer_config.kv_load_failure_policy == "recompute",
            pages_go_early=self._groups.windowed,
        )
        self.scheduling = Scheduling(self._link, rules)

    def new(self, request: Any) -> None:
        """A request that cannot be told apart from others by its tokens is not known here, so it is not cached."""
        adapter = request.lora_request
        told_apart = (
            request.prompt_embeds is None
            and request.prompt_token_ids is not None
            and not request.resumable
            and not (adapter is not None and adapter.load_inplace)
        )
        if self.scheduling is None or not told_apart:
            return
        self.scheduling.new(
            RequestFacts(
                id=request.request_id,
                token_ids=request.all_token_ids,
                identity=Identity(
                    adapter=None
                    if adapter is None
                    else (f"{adapter.lora_name} {adapter.lora_int_id}", adapter.lora_path),
                    salt=request.cache_salt or None,
                ),
                items=tuple(
                    Item(
                        identifier=feature.identifier,
                        offset=feature.mm_position.offset,
                        length=feature.mm_position.length,
                    )
                    for feature in request.mm_features
                ),
                describe=self._describer(request),
            )
        )

    def plan(self, output: Any) -> StepPlan:
        """What the ranks are to do in this step."""
        if self.scheduling is None:
            return StepPlan()
        state = output.kv_connector_block_state

        def block_ids_of(name: str) -> tuple[list[int], ...] | None:
            ids = None if state is None else state.get_block_ids(name)
            return None if ids is None else self.block_ids(ids)

        return self.scheduling.plan(_computed(output), output.preempted_req_ids or (), block_ids_of)

    def ended(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """See Scheduling."""
        if self.scheduling is None:
            return False
        ids = self.block_ids(block_ids) if any(block_ids) else ()
        computed = request.num_computed_tokens
        return self.scheduling.ended(request.request_id, ids, computed, self._ending(request))

    def _ending(self, request: Any) -> Ending | None:
        """How its answer ended by itself; None: it was cut short."""
        if request.status.name != "FINISHED_STOPPED":
            return None
        return ending_of(request.output_token_ids, self._tools)

    def block_ids(self, every: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Of the groups that are cached."""
        return tuple(every[number] for number in self._groups.numbers)

    def close(self) -> None:
        """Gives the session up."""
        if self._link is not None:
            self._link.close(_CLOSE_S)

    def _room_blocks(self) -> int:
        tokens = int(self._config.scheduler_config.max_num_batched_tokens)
        step = -(-tokens // self._groups.block_tokens)
        return min(_MAX_ROOM_BLOCKS, 2 * step + _MIN_ROOM_BLOCKS)

    def _describer(self, request: Any) -> Callable[[int, int], object] | None:
        """vLLM's event for stored blocks, named by vLLM's own hashes, so that its consumers know them."""
        hashed_tokens = getattr(self._kv_cache_config, "hash_block_size", None)
        if not self._wants_events or hashed_tokens != self._groups.block_tokens:
            return None
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        size = self._groups.block_tokens

        def describe(begin: int, end: int) -> object:
            hashes = [
                maybe_convert_block_hash(block) for block in request.block_hashes[max(0, begin - 1) : end]
            ]
            return BlockStored(
                block_hashes=hashes[1 if begin else 0 :],
                parent_block_hash=hashes[0] if begin else None,
                token_ids=request.all_token_ids[begin * size : end * size],
                block_size=size,
                lora_id=request.lora_request.lora_int_id if request.lora_request else None,
                medium="CPU",
                lora_name=request.lora_request.lora_name if request.lora_request else None,
            )

        return describe


def _computed(output: Any) -> Iterator[tuple[str, int]]:
    """Requests of a step, and how many of their tokens have KV after it."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for name, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield name, before + scheduled[name]


def _shape(config: Any, kv_cache_config: Any, groups: CacheGroups, rank: RankSaid, world: int) -> KvShape:
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    parts = world // replicas
    if rank.shared:
        source = shared_source(config)
        assert source is not None
        layers = LayerGroup(
            layers=source.config.num_layers,
            kv_heads=source.config.num_kv_heads,
            head_dim=source.config.head_dim,
            block_tokens=groups.block_tokens,
        )
        geometry = Geometry(groups=(layers,), dtype=kv_dtype(config))
    else:
        nbytes = parts * part_bytes(rank.payload_bytes)
        layers = LayerGroup(
            layers=1,
            kv_heads=1,
            head_dim=-(-nbytes // (2 * groups.block_tokens)),
            block_tokens=groups.block_tokens,
        )
        geometry = Geometry(groups=(layers,), dtype="float8_e4m3fn")  # bytes
    return KvShape(
        block_tokens=groups.block_tokens,
        geometry=geometry,
        order=rank.order,
        groups=groups.described,
        parts=parts,
        shared=rank.shared,
    )


def _tool_tokens(model: Any) -> frozenset[int]:
    """With which its answers begin calls of tools; none where its tokenizer has no folder here."""
    if model.skip_tokenizer_init or not model.tokenizer:
        return frozenset()
    name = str(model.tokenizer)
    folder = name if Path(name).is_dir() else _folder_of(name, model.tokenizer_revision)
    return frozenset() if folder is None else tool_tokens_in(Path(folder))


def _folder_of(model: str, revision: str | None) -> str | None:
    """Where a model of the hub lies on this machine; nothing is fetched."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 (whatever the hub's package raises: it is not here)
        return None
