"""Generate text from a prompt, with a running worker or an engine in this process.

Text goes to stdout as it comes, figures to stderr; with `--json` one object goes to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine_adapter.cli.assembly import EngineOptions, default_listen, open_engine, share_the_cpu
from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.cli.options import (
    CacheOption,
    DeviceOption,
    LoadFormatOption,
    ModelOption,
    TenantOption,
)
from engine_adapter.serving.jsonl import GenerateRequest, Message, Result
from kvstore.cli.settings import load_settings
from kvstore.config import Config
from kvstore.errors import InvalidArgument, Unavailable
from kvstore.units import format_duration

__all__ = ["generate", "read_prompt"]

_NAME = "generate"
_MAX_TIMEOUT_S = 86_400.0


_Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bitwise equal cold and cached; in this process.")
]


def generate(
    *,
    model: ModelOption = None,
    load_format: LoadFormatOption = None,
    device: DeviceOption = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    deterministic: _Deterministic = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Without the store; in this process.")] = False,
    cache: CacheOption = None,
    tenant: TenantOption = None,
    worker: Annotated[Path | None, typer.Option(help="Socket of a running worker.")] = None,
    socket: Annotated[str | None, typer.Option(help="Socket of the kvstore daemon.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of a worker's silence that are borne.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    file: Annotated[Path | None, typer.Option("--config", help="TOML file of the configuration.")] = None,
) -> None:
    """Generate text from a prompt, with a running worker or an engine in this process."""
    text = read_prompt(prompt, prompt_file)
    request = GenerateRequest(
        id=_NAME,
        prompt=text if raw else None,
        messages=None if raw else (Message(role="user", content=text.strip()),),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stream=True,
    )
    in_process = deterministic or no_cache or cache is not None or tenant is not None
    _check(worker, timeout, in_process=in_process)
    flags = {
        "socket": socket,
        "worker.model": model,
        "worker.load_format": load_format,
        "worker.device": device,
        "worker.cache": cache,
        "worker.tenant": tenant,
    }
    config = load_settings(flags, file=file).config
    connection = None if in_process else _find_worker(worker, config, timeout)
    if connection is not None:
        with connection:
            _show(connection.ask(request), as_json=as_json)
        return
    options = EngineOptions(
        worker=config.worker,
        store=None if no_cache else _find_store(config, asked=socket is not None),
        deterministic=deterministic,
        timeout_s=config.client.timeout_s,
    )
    _show(_in_process(options, request), as_json=as_json)


def _check(worker: Path | None, timeout: float, *, in_process: bool) -> None:
    """Raises InvalidArgument for a time-out that is none, and for options of an engine beside a worker's socket."""
    if not 0 < timeout <= _MAX_TIMEOUT_S:
        raise InvalidArgument(f"--timeout is above 0 and at most {_MAX_TIMEOUT_S:,} seconds, not {timeout}")
    if worker is not None and in_process:
        raise InvalidArgument(
            "--deterministic, --no-cache, --cache and --tenant belong to the worker: start it with them"
        )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text as it is. Raises InvalidArgument with what to do."""
    if (prompt is None) == (prompt_file is None):
        raise InvalidArgument("give --prompt TEXT or --prompt-file FILE")
    if prompt is None:
        assert prompt_file is not None
        prompt = _read(prompt_file)
    if not prompt.strip():
        raise InvalidArgument("the prompt is empty")
    if any(
        "\ud800" <= character <= "\udfff" for character in prompt
    ):  # how Python shows bytes that are no text
        raise InvalidArgument("the prompt is not UTF-8 text")
    return prompt


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot read the prompt {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the prompt {path} is not UTF-8 text") from error


def _find_worker(asked: Path | None, config: Config, timeout_s: float) -> WorkerConnection | None:
    """The worker that was asked for, or the one that would listen for this model, where it does."""
    if asked is not None:
        return WorkerConnection(asked, timeout_s=timeout_s)
    path = default_listen(config)
    if not path.exists():
        return None
    try:
        return WorkerConnection(path, timeout_s=timeout_s)
    except Unavailable:
        return None


def _find_store(config: Config, *, asked: bool) -> Path | None:
    """The daemon's socket; None where none was asked for and none is there."""
    path = Path(config.serve.socket)
    if asked or path.exists():
        return path
    print(f"no store on {path} (`kvstore serve` starts one): generating without a cache", file=sys.stderr)
    return None


def _in_process(options: EngineOptions, request: GenerateRequest) -> Iterator[str | Result]:
    """The same events as a worker's, from an engine in this process."""
    share_the_cpu()
    with open_engine(options, tell=lambda _: None) as engine:
        from engine_adapter.serving.requests import Answer, sampling_params, tokenize

        accepted_at = time.perf_counter()
        tokens = tokenize(request, engine.loaded.tokenizer)
        engine.add_request(tokens, sampling_params(request))
        answer = Answer(accepted_at=accepted_at, prompt_tokens=len(tokens))
        for output in engine.run():
            yield output.text
            if (result := answer.add(output, time.perf_counter())) is not None:
                yield result


def _show(events: Iterator[str | Result], *, as_json: bool) -> None:
    for event in events:
        if isinstance(event, str):
            if not as_json:
                print(event, end="", flush=True)
        elif as_json:
            print(json.dumps(_report(event), ensure_ascii=False))
        else:
            print(flush=True)
            Console(stderr=True, highlight=False).print(_summary(event), style="dim")


def _report(result: Result) -> dict[str, object]:
    """The object that `--json` prints."""
    return {
        "text": result.text,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "cached_by_tier": dict(result.cached_by_tier),
        "ttft_s": result.ttft_s,
        "tokens_per_s": result.tokens_per_s,
        "finish_reason": result.finish_reason,
    }


def _summary(result: Result) -> str:
    """The figures in one line."""
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in result.cached_by_tier.items() if count)
    cached = f"{result.cached_tokens:,} cached" + (f" ({tiers})" if tiers else "")
    first = "none" if result.ttft_s is None else format_duration(round(result.ttft_s, 3))
    return f"{result.prompt_tokens:,} prompt tokens, {cached}; first token {first}, {result.tokens_per_s:.1f} tokens/s"
