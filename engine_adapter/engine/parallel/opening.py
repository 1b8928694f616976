"""Opens a model over several devices: starts the members, loads the own shard, and ends all of them together."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

from torch import Tensor

from engine_adapter.engine.cuda_runner import CudaRunner
from engine_adapter.engine.device import compute_dtype, device_index
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.parallel.group import leave_group
from engine_adapter.engine.parallel.loading import LoadedShard, load_shard
from engine_adapter.engine.parallel.member import M, Member, MemberPlan, spawn_members
from engine_adapter.engine.parallel.messages import Table, same_numbers
from engine_adapter.engine.parallel.runner import ParallelRunner
from engine_adapter.engine.parallel.shard import Shard
from engine_adapter.engine.parallel.shard_config import shard_config
from engine_adapter.engine.runner import Runner
from engine_adapter.engine.runners import make_shard_runner
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource
from kvstore.geometry import DTYPE_BYTES

__all__ = ["ParallelModel", "StartedModel", "open_parallel", "start_parallel"]

_Numbers = Callable[[Table], Table]


class ParallelModel:
    """`loaded` is the own shard, as large as the engine's pages are to be; `make_runner` is for one `Engine`."""

    def __init__(
        self, shard: LoadedShard, members: Sequence[Member], numbers_of: _Numbers = same_numbers
    ) -> None:
        self.loaded = shard.loaded
        self.members = members
        self._group = shard.group
        self._numbers_of = numbers_of
        self._own: CudaRunner | None = None

    def make_runner(self, loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
        """The runner of all shards. Once: each member has one, and they must all have done the same."""
        if self._own is not None:
            raise RuntimeError("the members have a runner already")
        self._own = make_shard_runner(loaded, pool, settings, self._group)
        return ParallelRunner(self._own, self.members, self._numbers_of)

    def drop_graphs(self) -> None:
        """Before the group is left: NCCL waits until no graph holds sums of it."""
        if self._own is not None:
            self._own.drop_graphs()


class StartedModel(Generic[M]):
    """Members that have been started, and have yet to load their shards."""

    def __init__(self, source: ModelSource, plan: MemberPlan, members: list[M]) -> None:
        self.members = members
        self._source = source
        self._plan = plan

    @contextmanager
    def load(self, numbers_of: _Numbers = same_numbers) -> Iterator[ParallelModel]:
        """All shards, loaded at the same time. `numbers_of`: what pages of this process are called in all of them."""
        plan = self._plan
        shard = load_shard(self._source, plan.settings, plan.shard, plan.meeting_file)
        model = ParallelModel(shard, self.members, numbers_of)
        try:
            for member in self.members:
                member.await_ready()
            yield model
        finally:
            model.drop_graphs()
            for member in self.members:
                member.part()
            leave_group()  # while they leave it


@contextmanager
def start_parallel(
    source: ModelSource,
    settings: EngineSettings,
    *,
    size: int,
    num_pages: int,
    block_tokens: int,
    start: Callable[[MemberPlan], M],
) -> Iterator[StartedModel[M]]:
    """Starts the other processes of a model in `size` shards, on devices from the settings' own on.

    Every shard has `num_pages` pages. ConfigError where the model cannot be cut so.
    """
    config = shard_config(source.config, size)
    meeting_fd = os.memfd_create("kvstore-group")
    try:
        plan = MemberPlan(
            model=str(source.path),
            seed=source.seed,
            settings=settings,
            shard=Shard(rank=0, size=size),
            num_pages=num_pages,
            page_bytes=config.page_bytes(block_tokens, DTYPE_BYTES[compute_dtype(settings.device)]),
            block_tokens=block_tokens,
            meeting_fd=meeting_fd,
        )
        with spawn_members([_of_rank(plan, rank) for rank in range(1, size)], start) as members:
            yield StartedModel(source, plan, members)
    finally:
        os.close(meeting_fd)


@contextmanager
def open_parallel(
    source: ModelSource, settings: EngineSettings, *, size: int, num_pages: int, block_tokens: int
) -> Iterator[ParallelModel]:
    """The same with its shards loaded, over pages in each process's own memory.

    ConfigError where the model cannot be cut so; Unavailable where a member does not start.
    """
    with (
        start_parallel(
            source, settings, size=size, num_pages=num_pages, block_tokens=block_tokens, start=Member
        ) as started,
        started.load() as model,
    ):
        yield model


def _of_rank(plan: MemberPlan, rank: int) -> MemberPlan:
    settings = plan.settings
    if settings.device != "cpu":
        settings = replace(settings, device=f"cuda:{device_index(settings.device) + rank}")
    return replace(plan, settings=settings, shard=replace(plan.shard, rank=rank))
