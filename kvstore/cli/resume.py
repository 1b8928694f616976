"""Take the cache back into use that `kvstore pause` or the configuration has restricted.

What was cached when it was paused is hit again. A tenant or a namespace that was paused by itself is resumed by itself.
"""

from __future__ import annotations

from kvstore.cache_use import CacheUse
from kvstore.cli.pause import JsonOption, NamespaceOption, SocketOption, TenantOption, set_use

__all__ = ["resume"]


def resume(
    *,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the cache back into use."""
    set_use(CacheUse.ON, tenant, namespace, socket, as_json=as_json)
