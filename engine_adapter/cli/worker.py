"""Run the bundled engine as a worker process.

Prints one line when it is ready. Requests come as JSON lines over a unix socket (`engine_adapter.serving.jsonl`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from engine_adapter.cli.assembly import EngineOptions, default_listen, open_engine, share_the_cpu
from engine_adapter.cli.options import (
    CacheOption,
    DeviceOption,
    HbmOption,
    LoadFormatOption,
    ModelOption,
    TenantOption,
    TensorParallelOption,
)
from engine_adapter.serving.listening import listening, make_own_folder
from kvstore.cli.settings import load_settings
from kvstore.units import format_duration

__all__ = ["worker"]

_log = logging.getLogger(__name__)


_Listen = Annotated[Path | None, typer.Option(help="Socket for requests; beside the daemon's if not given.")]
_Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bitwise equal logits cold and cached; slower.")
]


def worker(
    *,
    model: ModelOption = None,
    load_format: LoadFormatOption = None,
    device: DeviceOption = None,
    listen: _Listen = None,
    socket: Annotated[str | None, typer.Option(help="Socket of the kvstore daemon.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run without the store.")] = False,
    cache: CacheOption = None,
    tenant: TenantOption = None,
    hbm: HbmOption = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens in a block.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of one prefill step.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Requests in one batch.")] = None,
    tensor_parallel: TensorParallelOption = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0: all cores.")] = None,
    deterministic: _Deterministic = False,
    as_json: Annotated[bool, typer.Option("--json", help="The ready line as JSON.")] = False,
    file: Annotated[Path | None, typer.Option("--config", help="TOML file of the configuration.")] = None,
) -> None:
    """Run the bundled engine as a worker process until SIGTERM."""
    started = time.perf_counter()
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    flags = {
        "socket": socket,
        "worker.model": model,
        "worker.load_format": load_format,
        "worker.device": device,
        "worker.socket": None if listen is None else str(listen),
        "worker.hbm": hbm,
        "worker.block_tokens": block_tokens,
        "worker.chunk_tokens": chunk_tokens,
        "worker.max_requests": max_requests,
        "worker.tensor_parallel": tensor_parallel,
        "worker.threads": threads,
        "worker.cache": cache,
        "worker.tenant": tenant,
    }
    config = load_settings(flags, file=file).config
    path = default_listen(config)
    options = EngineOptions(
        worker=config.worker,
        store=None if no_cache else Path(config.serve.socket),
        deterministic=deterministic,
        timeout_s=config.client.timeout_s,
    )
    share_the_cpu()
    if config.worker.socket is None:
        make_own_folder(path.parent)
    # The socket first: what is wrong with it shows at once, and who connects early waits.
    with listening(path) as listener, open_engine(options, tell=_log.info) as engine:
        from engine_adapter.serving.worker import WorkerLimits, serve

        def ready() -> None:
            print(_ready_line(config.worker.model, path, time.perf_counter() - started, as_json), flush=True)

        serve(engine, listener, limits=WorkerLimits(), ready=ready)


def _ready_line(model: str, path: Path, load_s: float, as_json: bool) -> str:
    if as_json:
        return json.dumps({"event": "ready", "socket": str(path), "pid": os.getpid(), "load_s": load_s})
    return f"ready: {model} on {path} after {format_duration(round(load_s, 2))}"
