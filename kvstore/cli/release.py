"""Let HBM go that no engine maps any more (orphans of killed workers).

Without it, orphaned HBM is kept for `orphan_ttl` so that the next worker finds its blocks.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvstore.cli.admin import call_admin
from kvstore.units import format_size
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["release"]


def release(
    *,
    gpu: Annotated[int, typer.Option(min=0, help="Device whose orphaned HBM is let go.")] = 0,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let HBM go that no engine maps any more."""
    reply = call_admin(socket, "ReleaseDevice", pb.ReleaseDeviceRequest(device=gpu))
    if as_json:
        print(json.dumps({"released_bytes": reply.released_bytes, "kept_bytes": reply.kept_bytes}))
        return
    print(f"released {format_size(reply.released_bytes)} of device {gpu}")
    if reply.kept_bytes:
        print(f"{format_size(reply.kept_bytes)} stay: a live engine maps them")
