"""The half of vLLM's connector in each rank: from vLLM's tensors and steps to `external.working`.

The worker's thread calls. A rank that cannot keep its KV says why, and does nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from engine_adapter.copying.copier import TwinCopier
from engine_adapter.external.copiers import piece_copier
from engine_adapter.external.jobs import StepPlan, StepReport
from engine_adapter.external.moving import BlockMover, PieceMover, SharedBlocks, StepEvent
from engine_adapter.external.options import ConnectorOptions
from engine_adapter.external.pages import LayerPages, PieceMap, SharedLayer, part_bytes
from engine_adapter.external.ranks import RankListener
from engine_adapter.external.working import Working
from engine_adapter.vllm_connector.identity import shared_source
from engine_adapter.vllm_connector.messages import RankSaid
from engine_adapter.vllm_connector.pages import CacheGroups, cpu_layers, layer_pages
from kvstore.client import DramListener
from kvstore.client.dram_member import DramMember
from kvstore.errors import FailedPrecondition, KvstoreError
from kvstore.geometry import DTYPE_BYTES

__all__ = ["RankHalf"]

_CLOSE_S = 10.0


class RankHalf:
    """In each rank."""

    def __init__(
        self, config: Any, kv_cache_config: Any, groups: CacheGroups, options: ConnectorOptions
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._groups = groups
        self._options = options
        self._failed_pages: set[int] = set()
        self._listener: RankListener | None = None
        self._member: DramMember | None = None
        self._device: torch.device | None = None
        self._working: Working | None = None
        self.said = RankSaid(why_not="a rank has no KV")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV is there."""
        try:
            layers = layer_pages(kv_caches, self._groups, self._kv_cache_config.num_blocks)
            pieces = PieceMap(layers)
            tensor = next(iter(kv_caches.values()))
            shared = self._shared(layers, tensor)
            mover, listener = _mover(tensor.device, pieces, shared)
        except KvstoreError as error:
            self.said = RankSaid(why_not=str(error))
            return
        parallel = self._config.parallel_config
        replicas = getattr(self._kv_cache_config, "kv_tp_replicas", 1)
        self._device = tensor.device
        self._member = DramMember(parallel.rank + 1, timeout_s=self._options.timeout_s, listener=listener)
        self._working = Working(
            self._member,
            mover,
            part=parallel.rank // replicas,
            part_bytes=part_bytes(pieces.payload_bytes),
            stores=parallel.rank % replicas == 0,
        )
        member = self._member
        self._listener = RankListener(
            lambda said: member.join(said.path, bytes.fromhex(said.token), said.slot_bytes),
            timeout_s=self._options.timeout_s,
        )
        self.said = RankSaid(
            listener=self._listener.name,
            order=pieces.order,
            payload_bytes=pieces.payload_bytes,
            shared=shared is not None,
        )

    def before_step(self, plan: StepPlan) -> None:
        """Returns once no store reads a page that the step may overwrite."""
        if self._working is not None and plan.before_step:
            self._working.before_step(plan)

    def begin_loads(self, plan: StepPlan) -> None:
        """Behind what the device still does to the pages: zeroing is in the same stream."""
        if self._working is not None and (plan.loads or self._working.loads_wait):
            self._working.begin_loads(plan, self._event())

    def begin_stores(self, plan: StepPlan) -> None:
        """Behind the step that writes the pages."""
        if self._working is not None and (plan.stores or plan.held):
            self._working.begin_stores(plan, self._failed_pages, self._event() if plan.stores else None)

    def results(self) -> KVConnectorTransferResults:
        """What has ended. One group's failed pages are named one by one, several groups' by their request."""
        if self._working is None:
            return KVConnectorTransferResults()
        received = self._working.received()
        several = len(self._groups.layers) > 1
        if not several:
            self._failed_pages |= received.failed_pages
        return KVConnectorTransferResults(
            finished_sending=self._working.sent(),
            finished_recving=set(received.requests),
            failed_recving=set(received.failed_requests) if several else set(),
        )

    def take_failed_pages(self) -> set[int]:
        """Pages of loads that failed, once."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def report(self) -> StepReport | None:
        """Jobs that have ended since the last call."""
        return None if self._working is None else self._working.report()

    def rest(self) -> None:
        """The KV's memory goes: nothing is copied until the next plan."""
        if self._working is not None:
            self._working.rest()

    def close(self) -> None:
        """Nothing is copied afterwards."""
        if self._listener is not None:
            self._listener.close()
        if self._working is not None:
            self._working.close(_CLOSE_S)
        if self._member is not None:
            self._member.close()

    def _event(self) -> StepEvent | None:
        if self._device is None or self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return StepEvent(handle=int(event.cuda_event), owner=event)

    def _shared(self, layers: list[LayerPages], tensor: torch.Tensor) -> list[SharedLayer] | None:
        """Where the elements are, if blocks are to be kept as the bundled engine has them."""
        wanted = self._options.layout
        if (
            wanted == "native"
            or tensor.device.type != "cpu"
            or len(self._groups.layers) != 1
            or shared_source(self._config) is None
        ):
            found = None
        else:
            found = _cpu_shared(layers, tensor, self._groups.block_tokens)
        if found is None and wanted == "shared":
            raise FailedPrecondition("layout shared: this model, device or layout cannot be converted")
        return found


def _mover(
    device: torch.device, pieces: PieceMap, shared: list[SharedLayer] | None
) -> tuple[BlockMover, DramListener | None]:
    """Who copies, and who pins DRAM for it."""
    if shared is not None:
        blocks = SharedBlocks(shared, part_bytes(pieces.payload_bytes))
        return PieceMover(blocks, TwinCopier(load=blocks.load(), store=blocks.store())), None
    copier, listener = piece_copier(device.type, device.index or 0)
    return PieceMover(pieces, copier), listener


def _cpu_shared(
    layers: list[LayerPages], tensor: torch.Tensor, block_tokens: int
) -> list[SharedLayer] | None:
    """Looks what the CPU backend makes of a page."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, heads, tokens, content = tensor.shape
    if tokens != block_tokens or content % 2 or str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return None
    head_dim = content // 2
    isa = _get_attn_isa(tensor.dtype, tokens, head_dim, "auto")
    slots = torch.arange(tokens, dtype=torch.int64)

    def write(key: NDArray[np.bool_], value: NDArray[np.bool_]) -> NDArray[np.bool_]:
        page = torch.zeros((1, heads, 2 * tokens, head_dim), dtype=tensor.dtype)
        keys, values = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            torch.from_numpy(key).to(tensor.dtype),
            torch.from_numpy(value).to(tensor.dtype),
            keys,
            values,
            slots,
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )
        return (page != 0).flatten().numpy()

    return cpu_layers(layers, write, heads=heads, tokens=tokens, head_dim=head_dim)
