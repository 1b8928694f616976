"""Take the cache out of use without losing it: all of it, or that of a tenant or a namespace.

What is cached stays. Requests go on and compute everything. `kvstore resume` takes it back into use; so does a restart
of the daemon, unless the configuration says otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvstore.cache_use import CacheUse
from kvstore.cli.admin import call_admin
from kvstore.cli.namespaces import ask, choose
from kvstore.errors import InvalidArgument
from kvstore.wire.cache_use import cache_use_message
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["JsonOption", "NamespaceOption", "SocketOption", "TenantOption", "pause", "set_use"]

TenantOption = Annotated[
    str | None, typer.Option(help="Only this tenant; `*`: those that are not configured.")
]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Only this namespace: its first digits, or its model.")
]
SocketOption = Annotated[str | None, typer.Option(help="Socket of the service.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SAYS = {
    CacheUse.ON: "is in use",
    CacheUse.READ: "gives hits and stores nothing",
    CacheUse.WRITE: "gives no hits and stores what is computed",
    CacheUse.OFF: "is paused: every lookup misses and nothing is stored",
    CacheUse.DRY_RUN: "gives no hits and counts what they would have been: `kvstore status` shows it",
}


def pause(
    *,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    cache: Annotated[
        str,
        typer.Option(
            help="What is still done: off (nothing), read (hits), write (stores), dry-run (stores, and counts what "
            "would have hit)."
        ),
    ] = CacheUse.OFF.value,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the cache out of use without losing it."""
    uses = {use.value: use for use in CacheUse if use is not CacheUse.ON}
    if cache not in uses:
        raise InvalidArgument(f"--cache {cache}: one of {', '.join(uses)}")
    set_use(uses[cache], tenant, namespace, socket, as_json=as_json)


def set_use(
    use: CacheUse, tenant: str | None, namespace: str | None, socket: str | None, *, as_json: bool
) -> None:
    """Says how the cache is used from now on. Raises: InvalidArgument, NotFound, and as calls do."""
    if tenant is not None and namespace is not None:
        raise InvalidArgument("give --tenant or --namespace, not both")
    digest = b"" if namespace is None else choose(ask(socket), namespace, None).digest
    request = pb.PauseRequest(
        paused=use is not CacheUse.ON,
        cache_use=cache_use_message(use.access),
        tenant=tenant or "",
        digest=digest,
    )
    call_admin(socket, "Pause", request)
    if as_json:
        print(json.dumps({"cache": use.value, "tenant": tenant, "namespace": digest.hex() or None}))
        return
    of = f" of tenant {tenant}" if tenant is not None else f" of namespace {digest.hex()}" if digest else ""
    print(f"the cache{of} {_SAYS[use]}")
