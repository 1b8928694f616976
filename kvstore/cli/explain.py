"""Say why a prompt is a miss: the first block that is not cached, and the cause.

The question as such, for tokens in a namespace; `engine_adapter.cli.explain` is the command, which also knows the
namespaces and the tokens of the bundled engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.cli.admin import open_client
from kvstore.errors import InvalidArgument
from kvstore.identity import HashChain
from kvstore.units import format_count
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["explain_files", "explain_tokens"]


def explain_files(namespace: Path, tokens: Path, *, socket: str | None, as_json: bool) -> None:
    """Prints why the prompt in two files is a miss. Raises InvalidArgument for files that are not as they must be."""
    parts = _parts(_load(namespace), namespace)
    token_ids = _load(tokens)
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise InvalidArgument(f"{tokens}: a JSON list of token ids is needed")
    block_tokens = _block_tokens(parts, namespace)
    explain_tokens(parts, token_ids, block_tokens, socket=socket, as_json=as_json)


def explain_tokens(
    parts: Mapping[str, bytes], token_ids: list[int], block_tokens: int, *, socket: str | None, as_json: bool
) -> None:
    """Prints why these tokens are a miss in the namespace of `parts`."""
    told, blocks = _ask(socket, parts, token_ids, block_tokens)
    if as_json:
        print(json.dumps(_as_dict(told, blocks, len(token_ids), block_tokens)))
    else:
        _show(told, blocks, len(token_ids), block_tokens)


def _ask(
    socket: str | None, parts: Mapping[str, bytes], token_ids: list[int], block_tokens: int
) -> tuple[pb.ExplainReply, int]:
    """The daemon's answer and the number of full blocks. A short session reaches the namespace."""
    group = pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=1, kv_heads=1, head_dim=1, block_tokens=block_tokens)
    with open_client(socket) as client:
        attached = client.call(
            "Attach", pb.AttachRequest(protocol_version=1, name="explain", groups=[group], dtype="float32")
        )
        try:
            opened = client.call(
                "OpenNamespace",
                pb.OpenNamespaceRequest(
                    token=attached.token,
                    parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in parts.items()],
                ),
            )
            hashes = HashChain(opened.key, block_tokens, token_ids).hashes
            request = pb.ExplainRequest(
                token=attached.token, namespace=opened.namespace, hashes=hashes.tobytes()
            )
            told: pb.ExplainReply = client.call("Explain", request)
        finally:
            client.call("Detach", pb.DetachRequest(token=attached.token))
    return told, len(hashes)


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


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error


def _parts(loaded: Any, path: Path) -> dict[str, bytes]:
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"{path}: a JSON object of tag to text is needed")
    parts = {}
    for tag, value in loaded.items():
        if isinstance(value, dict) and isinstance(value.get("hex"), str):
            try:
                parts[tag] = bytes.fromhex(value["hex"])
            except ValueError:
                raise InvalidArgument(f"{path}: the part {tag!r} is not hexadecimal") from None
        elif isinstance(value, str):
            parts[tag] = value.encode()
        else:
            raise InvalidArgument(f'{path}: the part {tag!r} is neither text nor {{"hex": "…"}}')
    return parts


def _block_tokens(parts: Mapping[str, bytes], path: Path) -> int:
    text = parts.get("block_tokens", b"").decode(errors="replace")
    if not text.isdecimal() or not int(text):
        raise InvalidArgument(f"{path}: the part 'block_tokens' must be a number")
    return int(text)
