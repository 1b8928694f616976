"""Forget blocks for good: a namespace, all of a model or of a tenant, or everything.

From the moment of the answer no request finds them, and no start brings them back. What an engine holds just now stays
until it lets go, and is counted.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvstore.cli.admin import call_admin
from kvstore.cli.namespaces import ask
from kvstore.errors import InvalidArgument, NotFound
from kvstore.units import format_count
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["clear"]

_ALL_NAMESPACES = 0xFFFFFFFF
_SHOWN_DIGITS = 12


def clear(
    *,
    namespace: Annotated[
        str | None, typer.Option(help="First digits of a namespace, as `kvstore namespaces` shows them.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Every namespace of this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Every namespace of this tenant.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forget blocks for good."""
    chosen = [choice for choice in (namespace, model, tenant) if choice is not None]
    if bool(chosen) == everything:
        raise InvalidArgument(
            "say what to clear: --namespace, --model or --tenant (together: all of them), or --all"
        )
    if everything:
        requests = [pb.ClearRequest(namespace=_ALL_NAMESPACES)]
    else:
        found = [info for info in ask(socket) if _is_meant(info, namespace, model, tenant)]
        if not found:
            raise NotFound(
                f"no namespace of {' and '.join(map(repr, chosen))}: `kvstore namespaces` lists them"
            )
        _one_alone(found, namespace)
        requests = [pb.ClearRequest(digest=info.digest) for info in found]
    replies: list[pb.ClearReply] = [call_admin(socket, "Clear", request) for request in requests]
    removed = sum(reply.removed_blocks for reply in replies)
    kept = sum(reply.kept_blocks for reply in replies)
    if as_json:
        print(json.dumps({"removed_blocks": removed, "kept_blocks": kept, "namespaces": len(replies)}))
        return
    print(f"{format_count(removed)} blocks are forgotten")
    if kept:
        print(f"{format_count(kept)} blocks are held by engines and stay until they let go: clear again then")


def _is_meant(info: pb.NamespaceInfo, namespace: str | None, model: str | None, tenant: str | None) -> bool:
    parts = {part.tag: part.value for part in info.parts}
    return (
        (namespace is None or info.digest.hex().startswith(namespace.lower()))
        and (model is None or parts.get("model") == model.encode())
        and (tenant is None or parts.get("tenant") == tenant.encode())
    )


def _one_alone(found: list[pb.NamespaceInfo], namespace: str | None) -> None:
    """Raises InvalidArgument where the first digits of a namespace are those of several."""
    if namespace is not None and len(found) > 1:
        names = ", ".join(info.digest.hex()[:_SHOWN_DIGITS] for info in found)
        raise InvalidArgument(f"{namespace!r} begins several namespaces: choose one of {names}")
