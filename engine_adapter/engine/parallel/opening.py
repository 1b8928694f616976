"""Opens a model over several devices: starts the members, loads the own shard, and ends all of them together."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from engine_adapter.engine.device import device_index
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.parallel.group import leave_group
from engine_adapter.engine.parallel.loading import LoadedShard, load_shard
from engine_adapter.engine.parallel.member import Member, MemberPlan, spawn_members
from engine_adapter.engine.parallel.runner import ParallelRunner
from engine_adapter.engine.parallel.shard import Shard, shard_config
from engine_adapter.engine.runner import Runner
from engine_adapter.engine.runners import make_shard_runner
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource

__all__ = ["ParallelModel", "open_parallel"]


class ParallelModel:
    """`loaded` is the own shard, as large as the engine's pages are to be; `make_runner` is for one `Engine`."""

    def __init__(self, shard: LoadedShard, members: Sequence[Member]) -> None:
        self.loaded = shard.loaded
        self.members = members
        self._reduce = shard.reduce
        self._has_runner = False

    def make_runner(self, loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
        """The runner of all shards. Once: each member has one, and they must all have done the same."""
        if self._has_runner:
            raise RuntimeError("the members have a runner already")
        self._has_runner = True
        return ParallelRunner(make_shard_runner(loaded, pool, settings, self._reduce), self.members)


@contextmanager
def open_parallel(
    source: ModelSource, settings: EngineSettings, *, size: int, num_pages: int, block_tokens: int
) -> Iterator[ParallelModel]:
    """The model cut into `size` shards, on devices from the settings' own on. Every shard has `num_pages` pages.

    ConfigError where the model cannot be cut so; Unavailable where a member does not start.
    """
    shard_config(source.config, size)
    with tempfile.TemporaryDirectory(prefix="kvstore-group-") as folder:
        plan = MemberPlan(
            model=str(source.path),
            seed=source.seed,
            settings=settings,
            shard=Shard(rank=0, size=size),
            num_pages=num_pages,
            block_tokens=block_tokens,
            meeting_file=str(Path(folder) / "group"),
        )
        with spawn_members([_of_rank(plan, rank) for rank in range(1, size)]) as members:
            shard = load_shard(source, settings, plan.shard, Path(plan.meeting_file))
            try:
                for member in members:
                    member.await_ready()
                yield ParallelModel(shard, members)
            finally:
                for member in members:
                    member.part()
                leave_group()  # while they leave it


def _of_rank(plan: MemberPlan, rank: int) -> MemberPlan:
    settings = plan.settings
    if settings.device != "cpu":
        settings = replace(settings, device=f"cuda:{device_index(settings.device) + rank}")
    return replace(plan, settings=settings, shard=replace(plan.shard, rank=rank))
