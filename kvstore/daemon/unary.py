"""The unary calls of service Kvstore: attach, detach, namespaces, flush, explain, statistics."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

from kvstore import __version__
from kvstore.cache_use import CacheUse
from kvstore.daemon.devices import Devices
from kvstore.daemon.handover import config_to_toml
from kvstore.daemon.identity import device_digest
from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory
from kvstore.daemon.movers import Movers
from kvstore.daemon.namespaces import Namespaces
from kvstore.daemon.owner import Owner
from kvstore.daemon.policies import policy_fields
from kvstore.daemon.session import TOKEN_BYTES, Session, token_digest
from kvstore.daemon.sessions import Sessions
from kvstore.daemon.tenancy import Tenancy
from kvstore.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvstore.geometry import Geometry, LayerGroup
from kvstore.layout import Tier
from kvstore.moves import SessionInfo, TierStats
from kvstore.wire.cache_use import cache_use_message, cache_use_of
from kvstore.wire.descriptors import descriptor_path
from kvstore.wire.packed import hashes_of, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["PROTOCOL_VERSION", "Unary", "session_stats"]

PROTOCOL_VERSION = 1
_MAX_NAME_BYTES = 128
_MAX_DETAIL_BYTES = 256
_MAX_MEMBERS = 64
_MAX_NAMESPACES_PER_SESSION = 4096
_LOG = Log("unary")


class Unary:
    """Answers unary calls. Every method raises KvstoreError for what it refuses; `rpc.answer` maps that."""

    def __init__(
        self,
        *,
        owner: Owner,
        sessions: Sessions,
        memory: Memory,
        devices: Devices,
        movers: Movers,
        namespaces: Namespaces,
        tenancy: Tenancy,
        keeper_pid: Callable[[], int],
    ) -> None:
        self._owner = owner
        self._sessions = sessions
        self._memory = memory
        self._devices = devices
        self._movers = movers
        self._namespaces = namespaces
        self._tenancy = tenancy
        self._keeper_pid = keeper_pid

    # ------------------------------------------------------------ sessions

    async def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """A new session, or an old one resumed."""
        if self._owner.draining:
            raise Unavailable("the daemon is going down", retry_after_s=1.0)
        if request.protocol_version != PROTOCOL_VERSION:
            raise InvalidArgument(
                f"protocol version {request.protocol_version}; this daemon speaks {PROTOCOL_VERSION}"
            )
        geometry = _geometry(request)
        access = cache_use_of(request.cache_use, CacheUse.ON).access
        if request.HasField("resume"):
            reply = self._resume(request)
            self._owner.store.sharing.allow_session(reply.session, access)
            self._owner.store.sharing.verifies(reply.session, request.verifies)
            return reply
        if len(request.name.encode()) > _MAX_NAME_BYTES:
            raise InvalidArgument(f"the name is longer than {_MAX_NAME_BYTES} bytes")
        members = request.members or 1
        if members > _MAX_MEMBERS:
            raise InvalidArgument(f"at most {_MAX_MEMBERS} members, not {members}")
        device = self._device(request)
        token = secrets.token_bytes(TOKEN_BYTES)
        identity = device_digest(request.device.identity, members)
        if device is not None:
            self._memory.make_room(device, geometry.slot_bytes, request.hbm_bytes, identity)
            self._devices.attached(device, request.device.kind, request.device.uuid)
        session = self._sessions.attach(
            digest=token_digest(token),
            name=request.name,
            device=device,
            slot_bytes=geometry.slot_bytes,
            hbm_bytes=request.hbm_bytes,
            members=members,
            identity=identity,
        )
        self._owner.store.sharing.allow_session(session.id, access)
        self._owner.store.sharing.verifies(session.id, request.verifies)
        return self._attached(session, token, resumed=False)

    def _resume(self, request: pb.AttachRequest) -> pb.AttachReply:
        resume = request.resume
        if len(resume.token) != TOKEN_BYTES:
            raise InvalidArgument(f"a token is {TOKEN_BYTES} bytes")
        session = self._owner.find_session(token_digest(resume.token))
        if session is None:
            raise NotFound("this session is gone: attach anew")
        hbm, hbm_generations = u32_of(resume.hbm_slots), u32_of(resume.hbm_generations)
        dram, dram_generations = u32_of(resume.dram_slots), u32_of(resume.dram_generations)
        if len(hbm) != len(hbm_generations) or len(dram) != len(dram_generations):
            raise InvalidArgument("a resume needs one generation for each slot")
        self._sessions.resume(session, hbm, hbm_generations, dram, dram_generations)
        return self._attached(session, resume.token, resumed=True)

    def _attached(self, session: Session, token: bytes, *, resumed: bool) -> pb.AttachReply:
        return pb.AttachReply(
            session=session.id,
            token=token,
            boot_epoch=self._owner.boot_epoch,
            slot_bytes=session.slot_bytes,
            resumed=resumed,
            descriptor_socket=descriptor_path(self._owner.config.socket),
            max_message_blocks=self._owner.config.limits.chain_blocks,
        )

    def _device(self, request: pb.AttachRequest) -> int | None:
        if not request.HasField("device") or request.device.kind == pb.DEVICE_KIND_UNSPECIFIED:
            return None
        if request.device.index >= self._owner.config.devices:
            raise InvalidArgument(
                f"device {request.device.index}: this daemon is configured for {self._owner.config.devices}"
            )
        return int(request.device.index)

    async def detach(self, request: pb.DetachRequest) -> pb.DetachReply:
        """Ends a session whose processes touch nothing of it any more."""
        self._sessions.detach(self._require(request.token))
        return pb.DetachReply()

    async def open_namespace(self, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceReply:
        """A handle and the key of the hash chain."""
        session = self._require(request.token)
        parts = {part.tag: part.value for part in request.parts}
        if len(parts) != len(request.parts):
            raise InvalidArgument("a part of the namespace is stated twice")
        known = self._namespaces.opened(parts)
        handle = self._tenancy.open(session.id, known)
        if handle not in session.namespaces and len(session.namespaces) >= _MAX_NAMESPACES_PER_SESSION:
            raise InvalidArgument(f"at most {_MAX_NAMESPACES_PER_SESSION} namespaces in one session")
        session.namespaces[int(handle)] = handle
        self._owner.requests.namespace_opened(handle, known.parts)
        return pb.OpenNamespaceReply(namespace=int(handle), key=known.key)

    # ------------------------------------------------------------ durability and reports

    async def flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        """Everything that is in DRAM now is on disk, or the deadline has passed."""
        limit_s = self._owner.config.limits.flush_deadline_s
        deadline_s = min(request.deadline_ms / 1000 or limit_s, limit_s)
        flushed = await self._movers.flush(deadline_s)
        return pb.FlushReply(
            durable_blocks=flushed.durable_blocks,
            pending_blocks=flushed.pending_blocks,
            unfit_blocks=flushed.unfit_blocks,
        )

    async def explain(self, request: pb.ExplainRequest) -> pb.ExplainReply:
        """Why a prompt was a miss."""
        session = self._require(request.token)
        namespace = session.namespaces.get(request.namespace)
        if namespace is None:
            raise PermissionDenied(f"this session has not opened a namespace {request.namespace}")
        hashes = hashes_of(request.hashes)
        if len(hashes) > self._owner.config.limits.chain_blocks:
            raise InvalidArgument(f"a chain has at most {self._owner.config.limits.chain_blocks} blocks")
        told = self._owner.store.explain(namespace=namespace, hashes=hashes)
        return pb.ExplainReply(
            cached_blocks=told.cached_blocks,
            cause=told.cause,
            detail=told.detail,
            blocks_by_tier=dict(told.blocks_by_tier),
            decision=self._owner.decisions.explain(namespace, hashes),
        )

    async def stats(self, _request: pb.StatsRequest) -> pb.StatsReply:
        """Gauges and counters."""
        return self.stats_now()

    def stats_now(self) -> pb.StatsReply:
        """The reply of Stats, for metrics too."""
        stats = self._owner.store.stats()
        now_ms = self._owner.now_ms()
        shadow = self._owner.requests.shadow
        shadow.resize(self._memory.dram_bytes)
        return pb.StatsReply(
            tiers=[self._tier_stats(tier) for tier in stats.tiers],
            sessions=[
                session_stats(info, now_ms, self._owner.decisions.of_session(info.session))
                for info in stats.sessions
            ],
            counters={**stats.counters, **self._owner.counters.values(), **self._movers.counters()},
            rows=stats.rows,
            max_rows=stats.max_rows,
            queued_reads=stats.queued_reads,
            queued_writes=stats.queued_writes,
            moves_in_flight=stats.moves_in_flight,
            uptime_s=time.monotonic() - self._owner.started_s,
            boot_epoch=self._owner.boot_epoch,
            paused=self._tenancy.everywhere is CacheUse.OFF,
            cache_use=cache_use_message(self._tenancy.everywhere.access),
            tenants=self._tenancy.tenant_stats(),
            restricted=self._tenancy.restricted(),
            pins=[
                pb.PinStats(
                    owner=pinned.owner,
                    blocks=pinned.blocks,
                    ends_in_s=max(0, pinned.until_ms - now_ms + 999) // 1000,
                )
                for pinned in self._owner.store.pins.owners()
            ],
            ready=not self._owner.draining,
            warnings=list(self._owner.warnings.values()),
            devices=self._devices.device_stats(),
            gpus=self._devices.gpu_stats(),
            paths=self._movers.path_stats(),
            dram_curve=[
                pb.SizePoint(dram_bytes=point.dram_bytes, hit_rate=point.hit_rate) for point in shadow.curve()
            ],
        )

    def _tier_stats(self, tier: TierStats) -> pb.TierStats:
        return pb.TierStats(
            tier=tier.tier.name.lower(),
            capacity_bytes=self._capacity(tier),
            allocated_bytes=tier.allocated_bytes,
            slots=tier.slots,
            free_slots=tier.free_slots,
            filling_slots=tier.filling_slots,
            sealed_slots=tier.sealed_slots,
            held_slots=tier.held_slots,
            orphan_slots=tier.orphan_slots,
            quarantined_slots=tier.quarantined_slots,
            **policy_fields(self._owner.store.hints.rankings, tier.tier),
        )

    def _capacity(self, tier: TierStats) -> int:
        match tier.tier:
            case Tier.HBM:
                return tier.allocated_bytes  # workers bring it
            case Tier.DRAM:
                return self._memory.dram_bytes
            case Tier.NVME:
                return self._movers.capacity_bytes

    async def describe(self, _request: pb.DescribeRequest) -> pb.DescribeReply:
        """What this daemon is."""
        return pb.DescribeReply(
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            boot_epoch=self._owner.boot_epoch,
            pid=os.getpid(),
            keeper_pid=self._keeper_pid(),
            config_toml=config_to_toml(self._owner.config),
            max_message_blocks=self._owner.config.limits.chain_blocks,
        )

    async def report_wrong(self, request: pb.ReportWrongRequest) -> pb.ReportWrongReply:
        """Blocks that a client has found wrong end."""
        session = self._require(request.token)
        namespace = session.namespaces.get(request.namespace)
        if namespace is None:
            raise PermissionDenied(f"this session has not opened a namespace {request.namespace}")
        hashes = hashes_of(request.hashes)
        if len(hashes) > self._owner.config.limits.chain_blocks:
            raise InvalidArgument(
                f"a report names at most {self._owner.config.limits.chain_blocks} blocks, not {len(hashes)}"
            )
        detail = request.detail.encode()[:_MAX_DETAIL_BYTES].decode(errors="replace")
        dropped = self._owner.store.watching.report(namespace, hashes, f"{session.name}: {detail}")
        self._owner.settle_soon()
        return pb.ReportWrongReply(dropped_blocks=dropped)

    def _require(self, token: bytes) -> Session:
        if len(token) != TOKEN_BYTES:
            raise Unauthenticated(f"a token is {TOKEN_BYTES} bytes")
        return self._owner.require_session(token_digest(token))


def _geometry(request: pb.AttachRequest) -> Geometry:
    for group in request.groups:
        if group.rule not in (pb.HIT_RULE_UNSPECIFIED, pb.HIT_RULE_ALL):
            raise Unimplemented("only groups of full attention (HIT_RULE_ALL) are built today")
        if group.rule == pb.HIT_RULE_UNSPECIFIED:
            raise InvalidArgument("a layer group must name its hit rule")
    groups = tuple(
        LayerGroup(
            layers=group.layers,
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            block_tokens=group.block_tokens,
        )
        for group in request.groups
    )
    return Geometry(groups=groups, dtype=request.dtype)


def session_stats(info: SessionInfo, now_ms: int, loads: pb.LoadStats | None = None) -> pb.SessionStats:
    """One session on the wire."""
    return pb.SessionStats(
        session=info.session,
        name=info.name,
        state=info.state,
        members=info.members,
        held_hbm_slots=info.held_hbm_slots,
        held_dram_slots=info.held_dram_slots,
        age_s=max(0, now_ms - info.attached_ms) / 1000,
        loads=loads,
        cache_use=cache_use_message(info.access),
    )
