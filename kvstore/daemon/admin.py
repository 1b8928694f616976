"""The calls of service Admin. Offered only where the peer is the daemon's own user (`app` decides on which socket)."""

from __future__ import annotations

import asyncio

from kvstore.cache_use import CacheUse
from kvstore.daemon.memory import Memory
from kvstore.daemon.movers import Movers
from kvstore.daemon.owner import Owner
from kvstore.daemon.resizing import Resizing
from kvstore.daemon.sessions import Sessions
from kvstore.daemon.tenancy import Tenancy
from kvstore.daemon.unary import session_stats
from kvstore.errors import InvalidArgument
from kvstore.moves import NamespaceId
from kvstore.wire.cache_use import cache_use_of
from kvstore.wire.packed import hashes_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from tiers.nvme.cleared import EVERY_NAMESPACE

__all__ = ["Admin"]

_ALL_NAMESPACES = 0xFFFFFFFF
_DIGEST_BYTES = 16
_NEXT_MS_S = 0.002
"""A start passes over what is no younger than a clear: whatever is stored after the answer must be of a later ms."""


class Admin:
    """Answers administrators. Every method raises KvstoreError for what it refuses."""

    def __init__(
        self,
        *,
        owner: Owner,
        sessions: Sessions,
        memory: Memory,
        movers: Movers,
        resizing: Resizing,
        tenancy: Tenancy,
    ) -> None:
        self._owner = owner
        self._store = owner.store
        self._sessions = sessions
        self._memory = memory
        self._movers = movers
        self._resizing = resizing
        self._tenancy = tenancy

    async def pin(self, request: pb.PinRequest) -> pb.PinReply:
        """Keeps a chain from eviction for a time."""
        if not request.ttl_s:
            raise InvalidArgument("a pin needs a time to live (ttl_s > 0)")
        pinned = self._store.pin(
            now_ms=self._owner.now_ms(),
            namespace=self._namespace(request.namespace),
            hashes=hashes_of(request.hashes),
            ttl_ms=request.ttl_s * 1000,
            owner=request.owner,
        )
        return pb.PinReply(pinned_blocks=pinned)

    async def unpin(self, request: pb.UnpinRequest) -> pb.UnpinReply:
        """Takes a pin back."""
        unpinned = self._store.unpin(
            namespace=self._namespace(request.namespace),
            hashes=hashes_of(request.hashes),
            owner=request.owner,
        )
        return pb.UnpinReply(unpinned_blocks=unpinned)

    async def clear(self, request: pb.ClearRequest) -> pb.ClearReply:
        """Removes the blocks of a namespace, or all, that nobody holds; answered when no start can bring them back.

        What is stored between call and answer may be a miss after a start; what is stored after the answer is not.
        """
        if len(request.digest) not in (0, _DIGEST_BYTES):
            raise InvalidArgument(
                f"a namespace's digest has {_DIGEST_BYTES} bytes, not {len(request.digest)}"
            )
        every = not request.digest and request.namespace == _ALL_NAMESPACES
        now_ms = self._owner.now_ms()
        if request.digest:
            namespace = self._store.intern_namespace(request.digest)
        else:
            namespace = self._namespace(request.namespace)
        result = self._store.clear(None if every else namespace)
        self._owner.settle_soon()
        for digest in (EVERY_NAMESPACE,) if every else result.digests:
            await self._movers.note_cleared(digest, now_ms)
        await asyncio.sleep(_NEXT_MS_S)
        return pb.ClearReply(removed_blocks=result.removed, kept_blocks=result.kept)

    async def leases(self, _request: pb.LeasesRequest) -> pb.LeasesReply:
        """Who holds what."""
        now_ms = self._owner.now_ms()
        return pb.LeasesReply(sessions=[session_stats(info, now_ms) for info in self._store.stats().sessions])

    async def check_integrity(self, _request: pb.CheckIntegrityRequest) -> pb.CheckIntegrityReply:
        """The store's own invariants. O(rows + slots)."""
        return pb.CheckIntegrityReply(faults=self._store.check_integrity())

    async def release_device(self, request: pb.ReleaseDeviceRequest) -> pb.ReleaseDeviceReply:
        """Lets orphaned HBM of a device go at once."""
        if request.device >= self._owner.config.devices:
            raise InvalidArgument(
                f"device {request.device}: this daemon is configured for {self._owner.config.devices}"
            )
        released = self._memory.release(request.device)
        return pb.ReleaseDeviceReply(released_bytes=released.released_bytes, kept_bytes=released.kept_bytes)

    async def forget(self, request: pb.ForgetRequest) -> pb.ForgetReply:
        """Takes the administrator's word that a session's processes are gone."""
        session = self._owner.require_session_id(request.session)
        return pb.ForgetReply(freed_slots=self._sessions.forget(session))

    async def pause(self, request: pb.PauseRequest) -> pb.PauseReply:
        """Takes the service, a tenant or a namespace out of use, or back into it."""
        use = cache_use_of(request.cache_use, CacheUse.OFF) if request.paused else CacheUse.ON
        self._tenancy.use(use, tenant=request.tenant, digest=request.digest)
        return pb.PauseReply()

    async def resize(self, request: pb.ResizeRequest) -> pb.ResizeReply:
        """Gives a tier another size; asked again with the same one it says how far that is."""
        match request.tier:
            case "dram":
                return await self._resizing.resize_dram(request.capacity_bytes)
            case "nvme":
                return await self._resizing.resize_path(request.path, request.capacity_bytes)
        raise InvalidArgument(f"{request.tier!r} cannot be resized: dram, or a path of nvme")

    async def record(self, request: pb.RecordRequest) -> pb.RecordReply:
        """The prompts that were asked for since the last call."""
        recording = self._owner.requests.recording
        if request.stop:
            recording.stop()
            return pb.RecordReply()
        taken = recording.take(self._owner.now_ms())
        return pb.RecordReply(
            prompts=[
                pb.RecordedPrompt(
                    time_ms=prompt.time_ms,
                    session=prompt.session,
                    namespace=prompt.namespace,
                    block_tokens=prompt.block_tokens,
                    hashes=prompt.hashes,
                )
                for prompt in taken.prompts
            ],
            missed=taken.missed,
        )

    def _namespace(self, number: int) -> NamespaceId:
        return NamespaceId(number)
