"""The prompt that a command is about: the bundled engine's, as for `generate`, or that of an engine of one's own.

`explain`, `pin` and `unpin` have the same options for it, which stand here once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_adapter.cli.assembly import engine_settings, model_source, store_geometry, worker_parts
from engine_adapter.cli.generate import read_prompt
from engine_adapter.cli.options import (
    DeviceOption,
    LoadFormatOption,
    ModelOption,
    TenantOption,
    TensorParallelOption,
)
from engine_adapter.engine.source import ModelSource
from kvstore.cli.prompt_blocks import Prompt, read_files
from kvstore.cli.settings import load_settings
from kvstore.config import WorkerConfig
from kvstore.errors import InvalidArgument

__all__ = ["about_prompt"]

_GIVEN = ("chosen", "socket")


def about_prompt(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options that choose a prompt before its own; it is given `chosen` and `socket`."""
    choosing = inspect.signature(_choose, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    def run(**given: Any) -> None:
        chosen, socket = _choose(**{name: given.pop(name) for name in choosing})
        command(chosen=chosen, socket=socket, **given)

    options = [*choosing.values(), *(option for name, option in own.items() if name not in _GIVEN)]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what typer reads
    return run


def _choose(
    *,
    model: ModelOption = None,
    load_format: LoadFormatOption = None,
    device: DeviceOption = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The text alone; no chat template.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As an engine with --deterministic sees it.")
    ] = False,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens in a block.")] = None,
    tensor_parallel: TensorParallelOption = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of a deterministic engine.")] = None,
    tenant: TenantOption = None,
    namespace: Annotated[
        Path | None, typer.Option(help="JSON object with the parts of the namespace.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list with the token ids of the prompt.")] = None,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    file: Annotated[Path | None, typer.Option("--config", help="TOML file of the configuration.")] = None,
) -> tuple[Prompt, str]:
    """The prompt, and the service's socket. Raises InvalidArgument."""
    flags = {
        "socket": socket,
        "worker.model": model,
        "worker.load_format": load_format,
        "worker.device": device,
        "worker.block_tokens": block_tokens,
        "worker.tensor_parallel": tensor_parallel,
        "worker.threads": threads,
        "worker.tenant": tenant,
    }
    config = load_settings(flags, file=file).config
    if namespace is not None or tokens is not None:
        if namespace is None or tokens is None or prompt is not None or prompt_file is not None:
            raise InvalidArgument(
                "give --namespace FILE and --tokens FILE together, or a prompt instead of both"
            )
        return read_files(namespace, tokens), config.serve.socket
    text = read_prompt(prompt, prompt_file)
    return _prompt(config.worker, text, raw=raw, deterministic=deterministic), config.serve.socket


def _prompt(worker: WorkerConfig, text: str, *, raw: bool, deterministic: bool) -> Prompt:
    """As a worker with these settings has it."""
    source = model_source(worker)
    geometry = store_geometry(source, worker)
    parts = worker_parts(source, geometry, engine_settings(worker, deterministic=deterministic), worker)
    return Prompt(parts=parts, token_ids=_tokens(source, text, raw=raw), block_tokens=geometry.block_tokens)


def _tokens(source: ModelSource, text: str, *, raw: bool) -> list[int]:
    """The prompt's tokens, as `generate` makes them."""
    from engine_adapter.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    if raw:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text.strip()}])
