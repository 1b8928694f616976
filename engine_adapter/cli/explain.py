"""Say why a prompt is a miss: the first block that is not cached, and the cause.

Blocks are named by hash, and a hash by everything that makes KV interchangeable. For the bundled engine that follows
from the model and its settings: `--model` and `--prompt-file`, as for `generate`. For an engine of one's own two files
say it: the parts of the namespace (a JSON object of tag to text, or to {"hex": "…"}) and the token ids (a JSON list).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine_adapter.cli.assembly import engine_settings, model_source, store_geometry
from engine_adapter.cli.generate import read_prompt
from engine_adapter.cli.options import DeviceOption, LoadFormatOption, ModelOption, TensorParallelOption
from engine_adapter.engine.source import ModelSource
from engine_adapter.fingerprint import namespace_parts
from kvstore.cli.explain import explain_files, explain_tokens
from kvstore.cli.settings import load_settings
from kvstore.errors import InvalidArgument

__all__ = ["explain"]


def explain(
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
    namespace: Annotated[
        Path | None, typer.Option(help="JSON object with the parts of the namespace.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list with the token ids of the prompt.")] = None,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    file: Annotated[Path | None, typer.Option("--config", help="TOML file of the configuration.")] = None,
) -> None:
    """Say why a prompt is a miss."""
    flags = {
        "socket": socket,
        "worker.model": model,
        "worker.load_format": load_format,
        "worker.device": device,
        "worker.block_tokens": block_tokens,
        "worker.tensor_parallel": tensor_parallel,
        "worker.threads": threads,
    }
    config = load_settings(flags, file=file).config
    if namespace is not None or tokens is not None:
        if namespace is None or tokens is None or prompt is not None or prompt_file is not None:
            raise InvalidArgument(
                "give --namespace FILE and --tokens FILE together, or a prompt instead of both"
            )
        explain_files(namespace, tokens, socket=config.serve.socket, as_json=as_json)
        return
    text = read_prompt(prompt, prompt_file)
    source = model_source(config.worker)
    geometry = store_geometry(source, config.worker)
    parts = namespace_parts(source, geometry, engine_settings(config.worker, deterministic=deterministic))
    token_ids = _tokens(source, text, raw=raw)
    explain_tokens(parts, token_ids, geometry.block_tokens, socket=config.serve.socket, as_json=as_json)


def _tokens(source: ModelSource, text: str, *, raw: bool) -> list[int]:
    """The prompt's tokens, as `generate` makes them."""
    from engine_adapter.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    if raw:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text.strip()}])
