"""Give a tier another size while the service runs.

Smaller takes effect bit by bit: what was used longest ago is evicted, what is in use is waited for. The command returns
when the new size holds, and says meanwhile how far that is; ^C leaves the service at it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from kvstore.cli.admin import call_admin
from kvstore.units import format_count, format_size, parse_size
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["app"]

_PAUSE_S = 0.2
_Socket = Annotated[str | None, typer.Option(help="Socket of the service.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command()
def nvme(
    path: Annotated[str, typer.Argument(help="Folder of the path, as it is configured.")],
    size: Annotated[str, typer.Argument(help="Bound on all that it takes on the disk, like 50GiB.")],
    *,
    socket: _Socket = None,
    as_json: _Json = False,
) -> None:
    """Resize an NVMe path. It keeps the size over restarts, until the configuration says another one."""
    request = pb.ResizeRequest(tier="nvme", path=os.path.abspath(path), capacity_bytes=parse_size(size))
    _resize(request, socket, f"{request.path} takes at most", as_json=as_json)


@app.command()
def dram(
    size: Annotated[str, typer.Argument(help="Size of the tier, like 8GiB.")],
    *,
    socket: _Socket = None,
    as_json: _Json = False,
) -> None:
    """Resize the DRAM tier. The next `kvstore serve` takes the configured size again."""
    request = pb.ResizeRequest(tier="dram", capacity_bytes=parse_size(size))
    _resize(request, socket, "DRAM takes at most", as_json=as_json)


def _resize(request: pb.ResizeRequest, socket: str | None, done: str, *, as_json: bool) -> None:
    """Asks until the size holds."""
    said = ""
    while not (reply := call_admin(socket, "Resize", request)).complete:
        text = f"{format_count(reply.leaving_extents)} pieces to go" if reply.leaving_extents else "not yet"
        if reply.waits_for:
            text += f"; waits: {reply.waits_for}"
        if text != said and not as_json:
            print(text, flush=True)
        said = text
        time.sleep(_PAUSE_S)
    if as_json:
        print(json.dumps({"capacity_bytes": reply.capacity_bytes, "used_bytes": reply.used_bytes}))
    else:
        print(f"{done} {format_size(reply.capacity_bytes)}, {format_size(reply.used_bytes)} now")
