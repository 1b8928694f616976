"""Print the flag that has vLLM use the store: `vllm serve MODEL $(kvstore vllm-args)` needs `eval`, pasting does not.

kvstore is installed beside vLLM, in the same environment. Every option is checked here as vLLM's start would.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from engine_adapter.external.options import NOT_OF_VLLM, option_types, read_options
from kvstore.cli.settings import load_settings
from kvstore.errors import ConfigError

__all__ = ["transfer_config", "vllm_args"]

_POLICIES = ("recompute", "fail")
_OTHERS = ", ".join(sorted(set(option_types(NOT_OF_VLLM)) - {"layout", "socket"}))


def vllm_args(
    *,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="`shared` with the bundled engine, `native` to vLLM, or `auto`."),
    ] = None,
    on_failure: Annotated[
        str,
        typer.Option(help="What vLLM does where blocks are gone: `recompute` them, or `fail` the request."),
    ] = "recompute",
    option: Annotated[
        list[str] | None,
        typer.Option(help=f"Any other option as NAME=VALUE, also several times (docs/vllm.md): {_OTHERS}."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON alone.")] = False,
) -> None:
    """Print the flag that has vLLM use the store."""
    if on_failure not in _POLICIES:
        raise ConfigError(f"--on-failure must be one of {', '.join(_POLICIES)}, not {on_failure}")
    given: dict[str, object] = dict(_parsed(text) for text in option or ())
    given["socket"] = socket or load_settings(flags={}).config.serve.socket
    if layout is not None:
        given["layout"] = layout
    text = json.dumps(transfer_config(given, on_failure=on_failure))
    print(text if as_json else f"--kv-transfer-config {shlex.quote(text)}")


def transfer_config(options: Mapping[str, object], *, on_failure: str) -> dict[str, object]:
    """vLLM's `--kv-transfer-config`. Raises ConfigError for options that the connector would refuse."""
    read_options(options, without=NOT_OF_VLLM)
    return {
        "kv_connector": "KvstoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": on_failure,
        "kv_connector_extra_config": dict(options),
    }


def _parsed(text: str) -> tuple[str, object]:
    """NAME=VALUE, of the option's type where it can be."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--option {text}: write NAME=VALUE")
    try:
        return name, option_types().get(name, str)(value)
    except ValueError:
        return name, value  # which is refused, with its name
