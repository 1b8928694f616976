"""What the shell says of the sharing of one store: tenants with their quotas, and who may use the cache how.

`Store.sharing`. Owner only. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.cache_use import Access
from kvstore.leases.uses import Allowed
from kvstore.moves import NamespaceId
from kvstore.state import StoreState
from kvstore.tenant import Tenant
from kvstore.victims.quotas import TenantShare

__all__ = ["Sharing"]


class Sharing:
    """See the module."""

    __slots__ = ("_pools", "_state")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._pools = (state.hbm, state.dram, state.nvme)

    # -- tenants

    def configure(self, tenants: Sequence[Tenant]) -> None:
        """These are the tenants; every namespace is of `*` until `assign` says otherwise. O(slots)."""
        self._state.quotas.configure(tenants, self._pools)

    def assign(self, namespace: int, tenant: str) -> None:
        """Whose a namespace is of which there are no blocks yet; `*`, or a name that is not configured: the others'."""
        quotas = self._state.quotas
        quotas.assign(namespace, quotas.number_of(tenant))

    def reassign(self, namespace: int, tenant: str) -> None:
        """As `assign`, with the blocks that there are. O(slots)."""
        self.assign(namespace, tenant)
        self._state.quotas.recount(self._pools)

    def on_namespace(self, told: Callable[[NamespaceId, bytes], None]) -> None:
        """Has `told` called with each new handle, before there are blocks of it, and the first 16 bytes of its digest.

        It is called now with those that there are. O(slots).
        """
        namespaces = self._state.namespaces
        namespaces.on_new = told
        for digest, handle in namespaces.handles().items():
            told(handle, digest)
        self._state.quotas.recount(self._pools)

    def shares(self) -> list[TenantShare]:
        """What every tenant has; none where no tenants are configured."""
        return self._state.quotas.shares() if self._state.quotas.active else []

    def lookups(self) -> Mapping[str, tuple[int, int]]:
        """By tenant: blocks that its requests asked for since the start, and those of them that were hits."""
        return self._state.quotas.lookups

    # -- use

    def allow_everywhere(self, access: Access) -> None:
        """No request may do more than this."""
        self._state.uses.allow_everywhere(access)

    def allow(self, namespace: int, access: Access) -> None:
        """A namespace, and the tenant that it is of, allow this."""
        self._state.uses.allow(namespace, access)

    def allowed(self, session: int, namespace: int) -> Allowed:
        """What a request of a session may do with a namespace. Raises: NotFound."""
        return self._state.uses.of(self._state.sessions.get(session).use, namespace)

    def verifies(self, session: int, verifies: bool) -> None:
        """A session compares what it loads with its checksum, or does not. Raises: NotFound."""
        self._state.sessions.get(session).verifies = verifies

    def allow_session(self, session: int, access: Access) -> None:
        """A session allows itself this, until its processes are gone. Raises: NotFound."""
        self._state.sessions.get(session).use = int(access)
