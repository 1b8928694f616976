"""Say why a prompt is a miss: the first block that is not cached, and the cause."""

from __future__ import annotations

from typing import Annotated

import typer

from engine_adapter.cli.prompts import about_prompt
from kvstore.cli.explain import explain_prompt
from kvstore.cli.prompt_blocks import Prompt

__all__ = ["explain"]


@about_prompt
def explain(
    *,
    chosen: Prompt,
    socket: str,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say why a prompt is a miss."""
    explain_prompt(chosen, socket=socket, as_json=as_json)
