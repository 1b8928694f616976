"""Puts an engine together from the configuration: model, block manager, engine. What `worker` and `generate` share."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine_adapter.base import BlockManager
from engine_adapter.budget import hbm_bytes
from engine_adapter.engine.device import compute_dtype, device_index, device_name, resolve_device
from engine_adapter.engine.parallel.shard_config import shard_config
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource, find_model, find_shape
from engine_adapter.fingerprint import model_geometry, namespace_parts
from engine_adapter.group.watch import end_process, watched
from engine_adapter.loading.layer_groups import LayerGroups, layer_groups_of
from engine_adapter.loading.settings import choice_settings
from kvstore.config import Config, WorkerConfig
from kvstore.errors import ConfigError, Unavailable
from kvstore.geometry import Geometry
from kvstore.units import format_size

if TYPE_CHECKING:
    from engine_adapter.engine.engine import Engine
    from engine_adapter.engine.parallel.member import Member

__all__ = [
    "EngineOptions",
    "default_listen",
    "engine_settings",
    "model_source",
    "open_engine",
    "share_the_cpu",
    "store_geometry",
    "worker_parts",
]

_MAX_SLUG_CHARACTERS = 32
_CPU_CHUNK_TOKENS = 512
_GPU_CHUNK_TOKENS = 8192  # so many rows keep the products at the rate of the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to run a model. `store` is the daemon's socket; None runs without a cache, on this process's own pages."""

    worker: WorkerConfig
    store: Path | None
    deterministic: bool
    timeout_s: float


def default_listen(config: Config) -> Path:
    """Where a worker listens if nobody says: beside the daemon's socket, named by the model."""
    if config.worker.socket is not None:
        return Path(config.worker.socket)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.worker.model).stem)[:_MAX_SLUG_CHARACTERS] or "model"
    return Path(config.serve.socket).parent / f"worker-{name}.sock"


def share_the_cpu() -> None:
    """Lets torch's threads sleep while they wait for each other. Call before torch is imported.

    They do so hundreds of times in a step. Spinning, their default, takes the CPU from whoever they wait for where it
    is shared (with the store's copies, to begin with): three times the CPU time on two busy cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """An engine, and what is to be done once it is ready."""

    engine: Engine
    settle: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A block manager that may still be opening: `result` waits for it. `times` of its parts are known afterwards."""

    result: Callable[[], BlockManager]
    settle: Callable[[], None] = lambda: None
    times: Callable[[], Mapping[str, float]] = dict


@contextmanager
def open_engine(
    options: EngineOptions,
    tell: Callable[[str], None],
    beside: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> Iterator[Engine]:
    """An engine that is ready for its first request; `tell` hears what is being done.

    `beside` hears of the seconds of each part of attaching, which a thread does meanwhile.

    Raises ModelError for a model that cannot run, ConfigError for a device that is not there, and what connecting to
    the daemon raises.
    """
    source = model_source(options.worker)
    settings = engine_settings(options.worker, deterministic=options.deterministic)
    load = _one_device if options.worker.tensor_parallel == 1 else _several_devices
    with load(options, source, settings, tell, beside) as loaded:
        engine = loaded.engine
        if settings.device != "cpu":
            tell("capturing graphs")
            engine.prepare()
        tell("warming up")
        _warm_up(engine)
        loaded.settle()
        yield engine


@contextmanager
def _one_device(
    options: EngineOptions,
    source: ModelSource,
    settings: EngineSettings,
    tell: Callable[[str], None],
    beside: Callable[[Mapping[str, float]], None],
) -> Iterator[_Loaded]:
    pages = _num_pages(options, source, settings)
    # The daemon may own more of the device than was asked for; a request must fit what was.
    settings = replace(settings, max_tokens=pages * options.worker.block_tokens)
    with _block_manager(options, source, settings, pages) as pending:
        tell("loading torch")
        from engine_adapter.engine.engine import Engine
        from engine_adapter.engine.loader import load_model

        tell("loading the weights")
        model = load_model(source, settings)
        tell("the rest of attaching")
        blocks = pending.result()
        beside(pending.times())
        tell("making the engine")
        yield _Loaded(engine=Engine(model, blocks, settings), settle=pending.settle)


@contextmanager
def _several_devices(
    options: EngineOptions,
    source: ModelSource,
    settings: EngineSettings,
    tell: Callable[[str], None],
    beside: Callable[[Mapping[str, float]], None],  # noqa: ARG001 (the members attach first, beside nothing)
) -> Iterator[_Loaded]:
    """A shard of the model and of every page on each device, this process's own first."""
    worker = options.worker
    if options.deterministic:
        raise ConfigError("deterministic mode runs on one device: leave worker.tensor_parallel at 1")
    if settings.device != "cpu":
        first = device_index(settings.device)
        for index in range(first, first + worker.tensor_parallel):
            resolve_device(f"cuda:{index}")
    shard = replace(source, config=shard_config(source.config, worker.tensor_parallel))
    pages = _num_pages(options, shard, settings)
    settings = replace(settings, max_tokens=pages * worker.block_tokens)
    tell("loading torch")
    run = _in_own_memory if options.store is None else _over_the_store
    with run(options, source, settings, pages, tell) as engine:
        yield _Loaded(engine=engine)


@contextmanager
def _in_own_memory(
    options: EngineOptions,
    source: ModelSource,
    settings: EngineSettings,
    pages: int,
    tell: Callable[[str], None],
) -> Iterator[Engine]:
    from engine_adapter.engine.engine import Engine
    from engine_adapter.engine.parallel.opening import open_parallel

    worker = options.worker
    shard = replace(source, config=shard_config(source.config, worker.tensor_parallel))
    tell("loading the weights")
    with open_parallel(
        source,
        settings,
        size=worker.tensor_parallel,
        num_pages=pages,
        block_tokens=worker.block_tokens,
    ) as parallel:
        blocks = PlainBlockManager(
            num_pages=pages,
            page_bytes=store_geometry(shard, worker).slot_bytes,
            block_tokens=worker.block_tokens,
            device=settings.device,
        )
        with _watched(parallel.members):
            yield Engine(parallel.loaded, blocks, settings, make_runner=parallel.make_runner)


@contextmanager
def _over_the_store(
    options: EngineOptions,
    source: ModelSource,
    settings: EngineSettings,
    pages: int,
    tell: Callable[[str], None],
) -> Iterator[Engine]:
    """The members map their HBM before anybody loads weights, and copy until the session has ended."""
    from engine_adapter.blocks.opening import open_block_manager
    from engine_adapter.engine.engine import Engine
    from engine_adapter.engine.parallel.opening import start_parallel
    from engine_adapter.group.members import MemberGroup
    from engine_adapter.group.starting import StoreMember

    worker = options.worker
    geometry = store_geometry(source, worker)
    with ExitStack() as stack:
        started = stack.enter_context(
            start_parallel(
                source,
                settings,
                size=worker.tensor_parallel,
                num_pages=pages,
                block_tokens=worker.block_tokens,
                start=StoreMember,
            )
        )
        blocks = stack.enter_context(
            open_block_manager(
                socket=options.store,
                name=f"{source.path.stem} worker {os.getpid()}",
                geometry=geometry,
                parts=worker_parts(source, geometry, settings, worker),
                hbm_bytes=pages * geometry.slot_bytes // worker.tensor_parallel,
                device=settings.device,
                timeout_s=options.timeout_s,
                use=worker.cache,
                loads=choice_settings(worker, settings, source.config),
                group=MemberGroup([member.link for member in started.members]),
            )
        )
        tell("loading the weights")
        parallel = stack.enter_context(started.load(blocks.slots_of))
        stack.enter_context(_watched(started.members))
        yield Engine(parallel.loaded, blocks, settings, make_runner=parallel.make_runner)


def _watched(members: Sequence[Member]) -> AbstractContextManager[None]:
    """While it lasts, a member's death is this process's."""
    return watched({number: member.pid for number, member in enumerate(members, start=1)}, end_process)


def model_source(worker: WorkerConfig) -> ModelSource:
    """The model that this configuration names. Raises ModelError."""
    return find_shape(worker.model) if worker.load_format == "dummy" else find_model(worker.model)


def engine_settings(worker: WorkerConfig, *, deterministic: bool) -> EngineSettings:
    """How the engine runs with this configuration. Raises ConfigError for a device that is not there."""
    device = resolve_device(worker.device)
    on_gpu = device != "cpu"
    return EngineSettings(
        deterministic=deterministic,
        device=device,
        device_name=device_name(device) if deterministic else "",
        attention=worker.attention,
        overlap=1 if on_gpu and not deterministic else 0,
        tensor_parallel=worker.tensor_parallel,
        chunk_tokens=worker.chunk_tokens or (_GPU_CHUNK_TOKENS if on_gpu else _CPU_CHUNK_TOKENS),
        max_running=worker.max_requests,
        threads=worker.threads or max(1, len(os.sched_getaffinity(0)) // worker.tensor_parallel),
        canary_every=worker.canary_every,
    )


def store_geometry(source: ModelSource, worker: WorkerConfig) -> Geometry:
    """The shape of a block of this model with this configuration. Raises ConfigError as `engine_settings`."""
    dtype = compute_dtype(resolve_device(worker.device))
    return model_geometry(source, block_tokens=worker.block_tokens, dtype=dtype)


def _num_pages(options: EngineOptions, source: ModelSource, settings: EngineSettings) -> int:
    """Pages of the device's KV memory; at least one."""
    worker, dtype = options.worker, compute_dtype(settings.device)
    slot_bytes = model_geometry(source, block_tokens=worker.block_tokens, dtype=dtype).slot_bytes
    if options.store is not None:
        _find_daemon(options.store)
    budget_bytes = hbm_bytes(
        worker.hbm,
        settings.device,
        options.store,
        shards=worker.tensor_parallel,
        timeout_s=options.timeout_s,
    )
    if budget_bytes < slot_bytes:
        raise ConfigError(
            f"worker.hbm: {format_size(budget_bytes)} holds not even one block of this model "
            f"({format_size(slot_bytes)})"
        )
    return budget_bytes // slot_bytes


@contextmanager
def _block_manager(
    options: EngineOptions, source: ModelSource, settings: EngineSettings, pages: int
) -> Iterator[_Pending]:
    """Pages: the store's, or this process's own where there is no cache."""
    geometry = store_geometry(source, options.worker)
    if options.store is None:
        plain = PlainBlockManager(
            num_pages=pages,
            page_bytes=geometry.slot_bytes,
            block_tokens=geometry.block_tokens,
            device=settings.device,
        )
        yield _Pending(result=lambda: plain)
        return
    from engine_adapter.blocks.opening import StorePlan, begin_block_manager

    plan = StorePlan(
        socket=options.store,
        name=f"{source.path.stem} worker {os.getpid()}",
        geometry=geometry,
        parts=worker_parts(source, geometry, settings, options.worker),
        hbm_bytes=pages * geometry.slot_bytes,
        device=settings.device,
        timeout_s=options.timeout_s,
        use=options.worker.cache,
        loads=choice_settings(options.worker, settings, source.config),
        layer_groups=_layer_groups(geometry, settings, options.worker),
    )
    with begin_block_manager(plan) as pending:
        yield _Pending(result=pending.result, settle=pending.pin_ahead, times=lambda: pending.times)


def worker_parts(
    source: ModelSource, geometry: Geometry, settings: EngineSettings, worker: WorkerConfig
) -> Mapping[str, bytes]:
    """The namespace of this worker's blocks."""
    parts = namespace_parts(source, geometry, settings)
    return parts if worker.tenant is None else {**parts, "tenant": worker.tenant.encode()}


def _layer_groups(geometry: Geometry, settings: EngineSettings, worker: WorkerConfig) -> LayerGroups | None:
    """Deterministic mode computes a few tokens at a time through all layers: nothing hides a load there."""
    if worker.layer_groups == "off" or settings.deterministic:
        return None
    return layer_groups_of(geometry, chunk_tokens=settings.chunk_tokens)


def _find_daemon(path: Path) -> None:
    """Raises Unavailable, with what to do, where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            raise Unavailable(
                f"no daemon listens on {path} ({error.strerror or error}): start one with `kvstore serve`, "
                "name its socket with --socket, or run with --no-cache"
            ) from error


def _warm_up(engine: Engine) -> None:
    """One short request, so that what happens only once (threads, kernels, first touch of the weights) has happened.

    It is shorter than a block: nothing of it is stored.
    """
    from engine_adapter.engine.sampler import SamplingParams

    engine.generate([[0, 0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
