"""Keep the blocks of a prompt from eviction for a time, or let them go again.

What is pinned is what is cached of it, from its beginning.
"""

from __future__ import annotations

import math
from typing import Annotated

import typer

from engine_adapter.cli.prompts import about_prompt
from kvstore.cli.pin import pin_prompt, unpin_prompt
from kvstore.cli.prompt_blocks import Prompt
from kvstore.errors import InvalidArgument
from kvstore.units import parse_duration

__all__ = ["pin", "unpin"]

_MOST_S = 1 << 31
_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@about_prompt
def pin(
    *,
    chosen: Prompt,
    socket: str,
    ttl: Annotated[str, typer.Option(help="For how long, like 30m or 12h.")] = "1h",
    owner: Annotated[str, typer.Option(help="Who wants it: `unpin` with the same name takes it back.")] = "",
    as_json: _JsonOption = False,
) -> None:
    """Keep the blocks of a prompt from eviction for a time."""
    ttl_s = math.ceil(parse_duration(ttl))
    if not 0 < ttl_s < _MOST_S:
        raise InvalidArgument(f"--ttl {ttl}: a pin lasts from a second to 68 years")
    pin_prompt(chosen, ttl_s=ttl_s, owner=owner, socket=socket, as_json=as_json)


@about_prompt
def unpin(
    *,
    chosen: Prompt,
    socket: str,
    owner: Annotated[str, typer.Option(help="Whose pins end; without it, everybody's.")] = "",
    as_json: _JsonOption = False,
) -> None:
    """Let the blocks of a prompt go that were pinned."""
    unpin_prompt(chosen, owner=owner, socket=socket, as_json=as_json)
