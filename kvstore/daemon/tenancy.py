"""Whose each namespace is, and who may use the cache how: from the configuration, and what administrators say.

The store knows namespaces by handles and digests alone; here their parts name the tenant. What is said with Pause holds
until the daemon ends: a restart begins as the configuration says. Owner loop only.
"""

from __future__ import annotations

from typing import TypeVar

from kvstore.cache_use import Access, CacheUse
from kvstore.daemon.log import Log
from kvstore.daemon.namespaces import KnownNamespace, Namespaces
from kvstore.daemon.owner import Owner
from kvstore.errors import InvalidArgument, ResourceExhausted
from kvstore.moves import NamespaceId, SessionId
from kvstore.tenant import OTHERS
from kvstore.units import format_count
from kvstore.wire.cache_use import cache_use_message
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Tenancy"]

_Name = TypeVar("_Name", bytes, str)
_DIGEST_BYTES = 16
_MAX_NAME_BYTES = 4096  # of a part of a namespace
_MAX_RESTRICTED = 4096
_LOG = Log("tenancy")
_TOPIC = "use of the cache"
_SAYS = {
    CacheUse.READ: "hits are served, nothing new is stored",
    CacheUse.WRITE: "every lookup misses, what is computed is stored",
    CacheUse.OFF: "paused: every lookup misses, nothing is stored",
    CacheUse.DRY_RUN: "dry run: every lookup misses, and what it would have hit is counted",
}


class Tenancy:
    """See the module."""

    def __init__(self, owner: Owner, namespaces: Namespaces) -> None:
        """The store learns of the tenants here, and of each namespace that it has or gets."""
        self._owner = owner
        self._sharing = owner.store.sharing
        config = owner.config
        self.everywhere = config.cache
        """What the service allows."""
        self._configured: dict[str, CacheUse] = {
            tenant.name: tenant.cache for tenant in config.tenants if tenant.cache is not CacheUse.ON
        }
        self._of_tenant = dict(self._configured)
        self._of_namespace: dict[bytes, CacheUse] = {}  # by the first 16 bytes of what the tables call it
        self._names = {tenant.name for tenant in config.tenants}
        self._handles: dict[NamespaceId, tuple[bytes, str]] = {}  # digest and tenant of each
        self._sharing.configure(config.tenants)
        self._tenants = {
            digest[:_DIGEST_BYTES]: _tenant(known) for digest, known in namespaces.by_row_digest().items()
        }
        self._sharing.on_namespace(self._found)
        self._apply()

    def open(self, session: SessionId, known: KnownNamespace) -> NamespaceId:
        """Opens a namespace in a session. Raises: NotFound, ResourceExhausted."""
        digest, tenant = known.row_digest[:_DIGEST_BYTES], _tenant(known)
        self._tenants[digest] = tenant
        handle = self._owner.store.open_namespace(session, known.row_digest)
        if self._handles[handle] != (
            digest,
            tenant,
        ):  # blocks of it were found on disk, and nobody knew whose
            self._sharing.reassign(handle, tenant)
            self._is_of(handle, digest, tenant)
        return handle

    def _found(self, handle: NamespaceId, digest: bytes) -> None:
        """The store has a new handle, by which another namespace may have gone before."""
        tenant = self._tenants.get(digest, OTHERS)
        self._sharing.assign(handle, tenant)
        self._is_of(handle, digest, tenant)

    def _is_of(self, handle: NamespaceId, digest: bytes, tenant: str) -> None:
        self._handles[handle] = (digest, tenant)
        self._sharing.allow(handle, self._allowed(digest, tenant))

    def _allowed(self, digest: bytes, tenant: str) -> Access:
        of_tenant = self._of_tenant.get(tenant)
        if of_tenant is None:
            of_tenant = CacheUse.ON if tenant in self._names else self._of_tenant.get(OTHERS, CacheUse.ON)
        return of_tenant.access & self._of_namespace.get(digest, CacheUse.ON).access

    def use(self, use: CacheUse, *, tenant: str = "", digest: bytes = b"") -> None:
        """From now on this is what the service, a tenant or a namespace allows. ON: all, as if nothing was ever said.

        Raises: InvalidArgument, ResourceExhausted for more restrictions than are remembered.
        """
        if tenant and digest:
            raise InvalidArgument("a tenant or a namespace, not both")
        if len(tenant.encode()) > _MAX_NAME_BYTES:
            raise InvalidArgument(f"a tenant's name has at most {_MAX_NAME_BYTES} bytes")
        if digest and len(digest) != _DIGEST_BYTES:
            raise InvalidArgument(f"a namespace's digest has {_DIGEST_BYTES} bytes, not {len(digest)}")
        if tenant:
            self._restrict(self._of_tenant, tenant, use)
        elif digest:
            self._restrict(self._of_namespace, digest, use)
        else:
            self.everywhere = use
        _LOG.info("cache", use=use.value, tenant=tenant or None, namespace=digest.hex() or None)
        self._apply()
        self._owner.settle_soon()

    def _restrict(self, restricted: dict[_Name, CacheUse], name: _Name, use: CacheUse) -> None:
        if use is CacheUse.ON:
            restricted.pop(name, None)
        elif name not in restricted and len(restricted) >= _MAX_RESTRICTED:
            raise ResourceExhausted(f"{_MAX_RESTRICTED} are restricted already: resume some")
        else:
            restricted[name] = use

    def _apply(self) -> None:
        self._sharing.allow_everywhere(self.everywhere.access)
        for handle, (digest, tenant) in self._handles.items():
            self._sharing.allow(handle, self._allowed(digest, tenant))
        self._warn()

    def _warn(self) -> None:
        """Of what administrators have said: somebody has to end it. What the configuration says stands in status."""
        warnings = self._owner.warnings
        if self.everywhere in (CacheUse.ON, self._owner.config.cache):
            warnings.pop(_TOPIC, None)
        else:
            warnings[_TOPIC] = f"{_SAYS[self.everywhere]}; `kvstore resume` ends that"
        partly = len(self._of_tenant.items() - self._configured.items()) + len(self._of_namespace)
        if partly:
            warnings[f"{_TOPIC} in part"] = (
                f"tenants or namespaces that are not served in full: {format_count(partly)}; `kvstore status` lists "
                f"them, {self._ends_it()} ends that"
            )
        else:
            warnings.pop(f"{_TOPIC} in part", None)

    def _ends_it(self) -> str:
        """The command for those that are restricted: a bare `resume` is of the whole cache."""
        tenants = [name for name, use in self._of_tenant.items() if self._configured.get(name) is not use]
        ways = []
        if tenants:
            ways.append(f"`kvstore resume --tenant {tenants[0] if len(tenants) == 1 else 'NAME'}`")
        if self._of_namespace:
            ways.append("`kvstore resume --namespace DIGEST`")
        return " or ".join(ways)

    def restricted(self) -> list[pb.RestrictedUse]:
        """Tenants, then namespaces, of which less than all is allowed."""
        of_tenants = [
            pb.RestrictedUse(tenant=tenant, cache_use=cache_use_message(use.access))
            for tenant, use in sorted(self._of_tenant.items())
        ]
        of_namespaces = [
            pb.RestrictedUse(digest=digest, cache_use=cache_use_message(use.access))
            for digest, use in sorted(self._of_namespace.items())
        ]
        return of_tenants + of_namespaces

    def tenant_stats(self) -> list[pb.TenantStats]:
        """What each tenant of the configuration has, and the others together."""
        lookups = self._sharing.lookups()
        found: dict[str, pb.TenantStats] = {}
        for share in self._sharing.shares():
            if share.tenant not in found:
                asked, hit = lookups[share.tenant]
                found[share.tenant] = pb.TenantStats(tenant=share.tenant, asked_blocks=asked, hit_blocks=hit)
            found[share.tenant].tiers.add(
                tier=share.tier.name.lower(),
                used_bytes=share.used_bytes,
                quota_bytes=share.quota_bytes,
                reserve_bytes=share.reserve_bytes,
                evicted_blocks=share.evicted_blocks,
            )
        return list(found.values())


def _tenant(known: KnownNamespace) -> str:
    """What its parts say; `*` where they say nothing."""
    return known.parts.get("tenant", b"").decode(errors="replace") or OTHERS
