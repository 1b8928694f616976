"""Say why a prompt is a miss: the first block that is not cached, and the cause.

The question as such; `engine_adapter.cli.explain` is the command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvstore.cli.admin import open_client
from kvstore.cli.prompt_blocks import Prompt, opened
from kvstore.units import format_count
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["explain_prompt"]


def explain_prompt(prompt: Prompt, *, socket: str | None, as_json: bool) -> None:
    """Prints why this prompt is a miss."""
    with open_client(socket) as client, opened(client, prompt, "explain") as found:
        request = pb.ExplainRequest(
            token=found.token, namespace=found.namespace, hashes=found.hashes.tobytes()
        )
        told: pb.ExplainReply = client.call("Explain", request)
    blocks, tokens = len(found.hashes), len(prompt.token_ids)
    if as_json:
        print(json.dumps(_as_dict(told, blocks, tokens, prompt.block_tokens)))
    else:
        _show(told, blocks, tokens, prompt.block_tokens)


def _as_dict(told: pb.ExplainReply, blocks: int, tokens: int, block_tokens: int) -> Mapping[str, object]:
    return {
        "prompt_tokens": tokens,
        "blocks": blocks,
        "cached_blocks": told.cached_blocks,
        "cached_tokens": told.cached_blocks * block_tokens,
        "cause": told.cause,
        "detail": told.detail,
        "blocks_by_tier": dict(told.blocks_by_tier),
        "decision": told.decision,
    }


def _show(told: pb.ExplainReply, blocks: int, tokens: int, block_tokens: int) -> None:
    table = Table(show_header=False)
    table.add_row(
        "prompt", f"{format_count(tokens)} tokens, {format_count(blocks)} full blocks of {block_tokens}"
    )
    table.add_row(
        "cached", f"{format_count(told.cached_blocks)} blocks, {told.cached_blocks * block_tokens} tokens"
    )
    for tier, count in sorted(told.blocks_by_tier.items()):
        table.add_row(f"  in {tier}", format_count(count))
    if told.cause:
        table.add_row("first miss", f"block {format_count(told.cached_blocks)}: {told.cause}")
        table.add_row("", told.detail)
    if told.decision:
        table.add_row("last asked for", told.decision)
    Console().print(table)
