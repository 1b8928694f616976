"""Show the effective configuration and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli.settings import load_settings
from kvstore.errors import ConfigError
from kvstore.settings import Setting

__all__ = ["config"]


def config(
    *,
    file: Annotated[
        Path | None, typer.Option("--config", help="TOML file to read instead of the usual places.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Values in bytes and seconds, with their sources.")
    ] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="A file that gives this configuration.")] = False,
) -> None:
    """Show the effective configuration and where each value came from."""
    if as_json and as_toml:
        raise ConfigError("give --json or --toml, not both")
    settings = load_settings(file=file).settings
    if as_json:
        print(
            json.dumps(
                {item.key: {"value": item.value, "source": item.source} for item in settings}, indent=2
            )
        )
    elif as_toml:
        print(_toml(settings))
    else:
        Console().print(_table(settings))


def _table(settings: Sequence[Setting]) -> Table:
    table = Table(caption="A setting's variable is KVSTORE_ and its name in capitals, with _ for the dot.")
    for header in ("setting", "value", "from"):
        table.add_column(header, overflow="fold")
    for item in settings:
        text = ", ".join(item.text) if isinstance(item.text, tuple) else item.text
        style = "dim" if item.source == "default" else None
        table.add_row(item.key, text or "-", item.source, style=style)
    return table


def _toml(settings: Sequence[Setting]) -> str:
    """The settings as a TOML file; what has no value is a comment."""
    lines: list[str] = []
    section = ""
    for item in settings:
        table, _, name = item.key.rpartition(".")
        if table != section:
            section = table
            kind, _, name_of = table.partition(".")
            lines += ["", f"[{kind}.{json.dumps(name_of, ensure_ascii=False)}]" if name_of else f"[{table}]"]
        literal = _literal(item)
        line = f"# {name} is not set" if literal is None else f"{name} = {literal}"
        lines.append(line if item.source == "default" else f"{line}  # {item.source}")
    return "\n".join(lines)


def _literal(item: Setting) -> str | None:
    """The value of `item` in TOML, whose strings are JSON's."""
    if item.value is None:
        return None
    if isinstance(item.text, tuple):
        return json.dumps(list(item.text), ensure_ascii=False)
    if isinstance(item.value, int) and item.text == str(item.value):
        return item.text
    return json.dumps(item.text, ensure_ascii=False)
