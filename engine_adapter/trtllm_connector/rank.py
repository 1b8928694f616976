"""The half of TensorRT-LLM's connector in each rank: copies what the leader plans, and says so to it.

A load that fails cannot be told to TensorRT-LLM, which takes what was promised as computed: then this rank raises, and
the engine ends the request with an error instead of computing with pages that hold something else. It takes a slot
that was lost while it was held, or memory that does not come to this process.

The engine's thread calls; copies end on the mover's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapter.external.copiers import piece_copier
from engine_adapter.external.jobs import StepPlan
from engine_adapter.external.moving import PieceMover, StepEvent
from engine_adapter.external.options import ConnectorOptions
from engine_adapter.external.pages import Dimension, LayerPages, PieceMap, part_bytes
from engine_adapter.external.ranks import RankListener
from engine_adapter.external.working import Working
from engine_adapter.trtllm_connector.channel import Hello, RankChannel
from engine_adapter.trtllm_connector.leader import StepMetadata
from kvstore.client.dram_member import DramMember
from kvstore.errors import FailedPrecondition, KvstoreError, Unavailable

__all__ = ["Finished", "RankHalf"]

_LOG = logging.getLogger("kvstore.trtllm")
_CLOSE_S = 10.0
_NO_PLAN = StepPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Of the requests that the engine named: those that nothing copies any more."""

    saving: list[int]
    loading: list[int]


class RankHalf:
    """See the module."""

    def __init__(self, options: ConnectorOptions, rank: int, world: int) -> None:
        self._options = options
        self._rank = rank
        self._world = world
        self._said = Hello(rank=rank, world=world, why_not="a rank has no KV")
        self._device: Any = None
        self._listener: RankListener | None = None
        self._member: DramMember | None = None
        self._working: Working | None = None
        self._channel: RankChannel | None = None
        self._leader = ""
        self._plan = _NO_PLAN
        self._running: dict[int, str] = {}  # job → request
        self._failed: set[str] = set()  # requests whose loads did not come
        self._saving: set[int] = set()
        self._loading: set[int] = set()

    def register(self, pool: Any) -> None:
        """The KV is there: `[blocks, …]`, contiguous, a block all of its layers."""
        try:
            self._register(pool)
        except KvstoreError as error:
            self._said = Hello(rank=self._rank, world=self._world, why_not=str(error))

    def refuse(self, why_not: str) -> None:
        """The KV is not of a form that can be kept."""
        self._said = Hello(rank=self._rank, world=self._world, why_not=why_not)

    def _register(self, pool: Any) -> None:
        pieces = PieceMap([_block_pages(pool)])
        copier, listener = piece_copier(pool.device.type, pool.device.index or 0)
        self._device = pool.device
        self._member = member = DramMember(
            self._rank + 1, timeout_s=self._options.timeout_s, listener=listener
        )
        self._working = Working(
            member,
            PieceMover(pieces, copier),
            part=self._rank,
            part_bytes=part_bytes(pieces.payload_bytes),
        )
        self._listener = RankListener(
            lambda said: member.join(said.path, bytes.fromhex(said.token), said.slot_bytes),
            timeout_s=self._options.timeout_s,
        )
        self._said = Hello(
            rank=self._rank,
            world=self._world,
            listener=self._listener.name,
            order=f"{str(pool.dtype).removeprefix('torch.')} {tuple(pool.shape[1:])}",
            payload_bytes=pieces.payload_bytes,
        )

    # ------------------------------------------------------------ steps

    def bind(self, metadata: object) -> None:
        """What is to be done in the step that begins now."""
        if not isinstance(metadata, StepMetadata):
            self._plan = _NO_PLAN
            return
        if metadata.leader != self._leader:
            self._meet(metadata.leader)
        if self._working is not None and self._plan.stores:
            # The step that they belong to was never computed: the leader waits for their end all the same.
            self._working.begin_stores(
                self._plan, [page for job in self._plan.stores for page in job.pages[:, 0]]
            )
        self._plan = metadata.plan
        self._running |= {job.number: job.request for job in (*self._plan.loads, *self._plan.stores)}

    def _meet(self, leader: str) -> None:
        """Once, with the first plan. A leader that is not there means that nothing is kept."""
        self._leader = leader
        try:
            self._channel = RankChannel(leader, self._said)
        except (KvstoreError, OSError) as error:
            _LOG.warning("kvstore: the leader cannot be reached: nothing is kept: %s", error)

    def begin_loads(self, stream: Any) -> None:
        """Behind what the device still does to the pages."""
        if self._working is not None and (self._plan.loads or self._working.loads_wait):
            plan, self._plan = self._plan, StepPlan(stores=self._plan.stores)
            self._working.begin_loads(StepPlan(loads=plan.loads), self._event(stream))

    def begin_stores(self, stream: Any) -> None:
        """Behind the step that writes the pages."""
        plan, self._plan = self._plan, _NO_PLAN
        if self._working is not None and plan.stores:
            self._working.begin_stores(plan, (), self._event(stream))
        self._say()

    def finished(self, saving: Sequence[int], loading: Sequence[int]) -> Finished:
        """What has ended of all that was ever named here, each once. `saving`, `loading`: named for the first time.

        Raises Unavailable where a load has failed.
        """
        self._saving.update(saving)
        self._loading.update(loading)
        if self._working is not None and self._working.loads_wait:
            self._working.begin_loads(_NO_PLAN)
        self._say()
        if self._failed:
            raise Unavailable(
                f"KV of the requests {', '.join(sorted(self._failed))} was promised and could not be loaded: "
                "they cannot be computed with what is in their pages"
            )
        busy = {int(request) for request in self._running.values()}
        done = Finished(saving=sorted(self._saving - busy), loading=sorted(self._loading - busy))
        self._saving -= set(done.saving)
        self._loading -= set(done.loading)
        return done

    def _say(self) -> None:
        """Notes what has ended, and tells the leader."""
        if self._working is None:
            return
        self._failed |= self._working.received().failed_requests
        report = self._working.report()
        if report is None:
            return
        for number in report.done:
            self._running.pop(number, None)
        try:
            if self._channel is not None:
                self._channel.done(report)
        except OSError as error:  # it ends, and the engine with it
            _LOG.warning("kvstore: the leader has gone: %s", error)
            self._channel = None

    def close(self) -> None:
        """Nothing is copied afterwards."""
        if self._listener is not None:
            self._listener.close()
        if self._working is not None:
            self._working.close(_CLOSE_S)
        if self._member is not None:
            self._member.close()
        if self._channel is not None:
            self._channel.close()

    def _event(self, stream: Any) -> StepEvent | None:
        if self._device is None or self._device.type != "cuda":
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return StepEvent(handle=int(event.cuda_event), owner=event)


def _block_pages(pool: Any) -> LayerPages:
    """A block is one piece. Blocks are counted from 1: 0 is what `external` has for none."""
    if pool.dim() < 2 or not pool.is_contiguous():
        raise FailedPrecondition(f"a pool of shape {tuple(pool.shape)} is not blocks, one behind the other")
    itemsize = int(pool.element_size())
    block_bytes = int(pool.stride(0)) * itemsize
    return LayerPages(
        group=0,
        address=int(pool.data_ptr()) - block_bytes,
        block_stride=block_bytes,
        itemsize=itemsize,
        dimensions=(Dimension(name="element", size=block_bytes // itemsize, stride=itemsize),),
    )
