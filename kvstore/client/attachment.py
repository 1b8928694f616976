"""How a session is attached: its token, its namespaces, the memory it maps, and how all of that is taken up again.

Made on the caller's thread; afterwards the stream's thread alone resumes and renews.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvstore.cache_use import CacheUse
from kvstore.client.copied import Compares
from kvstore.client.credit import SlotRun
from kvstore.client.descriptors import Descriptors, MappedMemory
from kvstore.client.device import DeviceSpec, device_message, hbm_slots, open_device
from kvstore.client.group import WHOLE, Group, Shard, group_identity
from kvstore.client.memory import DramListener, HbmMemory
from kvstore.client.namespace import Namespace
from kvstore.client.rpc import Rpc
from kvstore.client.state import SessionState
from kvstore.errors import FailedPrecondition, KvstoreError, Unauthenticated, Unavailable
from kvstore.geometry import Geometry
from kvstore.identity import namespace_digest
from kvstore.layout import GENERATION_SHIFT, Tier
from kvstore.wire.cache_use import cache_use_message
from kvstore.wire.descriptors import descriptor_path
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Attachment"]

_LOG = logging.getLogger("kvstore.client")
_PROTOCOL_VERSION = 1
_MAP_TIMEOUT_S = 2.0
_GROUP_TIMEOUT_S = 120.0
"""For the answer to a shard of HBM: the other processes of a group open their devices meanwhile."""
_RETRY_S = 0.05

U32 = NDArray[np.uint32]


class Attachment:
    """The attached session, as the daemon knows it."""

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        geometry: Geometry,
        spec: DeviceSpec | None,
        timeout_s: float,
        listener: DramListener | None = None,
        group: Group | None = None,
        use: CacheUse = CacheUse.ON,
        compares: Compares = Compares.NOTHING,
    ) -> None:
        """Opens the device, attaches and maps. Raises: as `open_device`, as the daemon answers, and as the group."""
        self._group = group
        self._members = 1 if group is None else group.members
        # Without HBM of ours the other processes only map DRAM, where a block is whole.
        self._shard = WHOLE if spec is None else Shard(member=0, members=self._members)
        self._shard.nbytes(geometry.slot_bytes)  # whether blocks can be shared so
        self.geometry = geometry
        self._name = name
        self._use = use
        self._compares = compares
        self._spec = spec
        self._listener = listener
        self._rpc = rpc
        self._timeout_s = timeout_s
        self._namespaces: dict[bytes, Namespace] = {}
        self._opening = threading.Lock()
        self._device = None if spec is None else open_device(spec)
        try:
            self._reply = self._attach(None)
            self._descriptors = self._open_descriptors(None)
            try:
                self.memory: MappedMemory = self._map()
            except BaseException:
                self._detach()
                raise
        except BaseException:
            if self._device is not None:
                self._device.close()
            raise

    @property
    def max_message_blocks(self) -> int:
        """Most blocks that one message may name."""
        return self._reply.max_message_blocks

    def open_namespace(self, parts: Mapping[str, bytes]) -> Namespace:
        """See Session.open_namespace."""
        digest = namespace_digest(parts)
        with self._opening:
            namespace = self._namespaces.get(digest)
            if namespace is None:
                reply = self._open_patiently(parts)
                namespace = Namespace(parts, self.geometry.block_tokens, reply.namespace, reply.key)
                self._namespaces[digest] = namespace
            return namespace

    def report_wrong(self, namespace: Namespace, hashes: NDArray[np.uint64], detail: str) -> int:
        """See Session.report_wrong."""
        request = pb.ReportWrongRequest(
            token=self._reply.token, namespace=namespace.handle, hashes=hashes.tobytes(), detail=detail
        )
        try:
            reply: pb.ReportWrongReply = self._rpc.call("ReportWrong", request, self._timeout_s)
        except KvstoreError as error:
            _LOG.error("a wrong block could not be reported: %s (%s)", detail, error)
            return 0
        return reply.dropped_blocks

    def any_namespace(self) -> Namespace | None:
        """One that was opened."""
        return next(iter(self._namespaces.values()), None)

    def close(self) -> None:
        """Detaches, ends the liveness connection, then unmaps: nothing here touches a slot any more."""
        self._detach()
        self._descriptors.close()
        self.memory.dram.close()
        if self.memory.hbm is not None:
            self.memory.hbm.close()
        if self._device is not None:
            self._device.close()

    @property
    def token(self) -> bytes:
        """Names the session on the stream."""
        return self._reply.token

    def resume(self, state: SessionState) -> None:
        """Attaches again, states what is held, and notes what the daemon does not hold for this session."""
        held = state.statement()
        statement = pb.Resume(
            token=self._reply.token,
            hbm_slots=held.hbm.slots.tobytes(),
            hbm_generations=held.hbm.generations.tobytes(),
            dram_slots=held.dram.slots.tobytes(),
            dram_generations=held.dram.generations.tobytes(),
        )
        try:
            self._reply = self._attach(statement)
        except FailedPrecondition:  # the daemon waits for this process to present itself again
            if not self._reopen_descriptors():
                raise
            self._reply = self._attach(statement)
        self._reopen_descriptors()
        state.lose(self._missing(Tier.HBM, held.hbm), self._missing(Tier.DRAM, held.dram))
        self._reopen()

    def renew(self, state: SessionState) -> None:
        """Attaches as a new session: other tables, other extents behind the same pages."""
        self._descriptors.close()
        old = self.memory
        self._reply = self._attach(None)
        self._descriptors = self._open_descriptors(old.hbm)
        try:
            self.memory = self._map()
            self._reopen()
        except BaseException:
            self._descriptors.close()
            self._detach()
            self.memory = old
            raise
        old.dram.close()
        state.renew(self.memory.tables.columns.shape, self._reply.max_message_blocks)

    def wait_mapped(self, hbm: U32, dram: U32) -> bool:
        """See Connection.wait_mapped."""
        if self.memory.mapped(hbm, dram):
            return True
        return self._descriptors.wait_mapped(self.memory, hbm, dram, _MAP_TIMEOUT_S)

    def _reopen_descriptors(self) -> bool:
        """Presents this process again where the connection was lost."""
        if not self._descriptors.closed:
            return False
        self._descriptors.close()
        self._descriptors = self._open_descriptors(None)
        self._descriptors.open(self.memory)
        return True

    def _missing(self, tier: Tier, stated: SlotRun) -> U32:
        """Stated slots that the tables do not show as this session's, under that generation."""
        pool = self.memory.tables.columns.pool(tier)
        ours = (pool.holders[stated.slots] >> np.uint64(self._reply.session)) & np.uint64(1) != 0
        same = (pool.state[stated.slots] >> GENERATION_SHIFT).astype(np.uint32) == stated.generations
        missing: U32 = stated.slots[~(ours & same)]
        return missing

    def _attach(self, resume: pb.Resume | None) -> pb.AttachReply:
        groups = [
            pb.LayerGroup(
                rule=int(group.rule),  # type: ignore[arg-type]
                window_tokens=group.window_tokens,
                layers=group.layers,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                block_tokens=group.block_tokens,
            )
            for group in self.geometry.groups
        ]
        request = pb.AttachRequest(
            protocol_version=_PROTOCOL_VERSION,
            name=self._name,
            groups=groups,
            dtype=self.geometry.dtype,
            device=self._device_message(),
            hbm_bytes=self._budget_bytes(),
            members=self._members,
            resume=resume,
            cache_use=cache_use_message(self._use.access),
            verifies=self._compares is Compares.LOADS,
        )
        reply: pb.AttachReply = self._rpc.call("Attach", request, self._timeout_s)
        return reply

    def _budget_bytes(self) -> int:
        """HBM that the session will have at most, on all its devices: the budget of each in whole extents."""
        if self._spec is None or self._device is None or not self._spec.hbm_bytes:
            return 0
        slot_bytes = self.geometry.slot_bytes
        return hbm_slots(self._device, self._shard.nbytes(slot_bytes), self._spec.hbm_bytes) * slot_bytes

    def _device_message(self) -> pb.Device | None:
        message = device_message(self._spec, self._device)
        if message is not None and self._group is not None:
            message.identity = group_identity([message.identity, *self._group.identities])
            message.uuid = ",".join([message.uuid, *self._group.uuids]).strip(",")
        return message

    def _map(self) -> MappedMemory:
        """Maps what there is and gives what is missing, at the same time as the other processes of a group."""
        if self._group is not None:
            self._group.join(
                self._descriptor_path(),
                self._reply.token,
                self._reply.slot_bytes,
                0 if self._spec is None else self._spec.index,
            )
        try:
            memory = self._descriptors.open()
        except KvstoreError:
            if self._group is not None:
                self._group.check()  # says it better
            raise
        if self._group is not None:
            self._group.wait_joined(0 if memory.hbm is None else memory.hbm.num_pages)
        return memory

    def _descriptor_path(self) -> str:
        return self._reply.descriptor_socket or descriptor_path(self._rpc.socket_path)

    def _open_descriptors(self, hbm_range: HbmMemory | None) -> Descriptors:
        return Descriptors(
            self._descriptor_path(),
            self._reply.token,
            slot_bytes=self._reply.slot_bytes,
            spec=self._spec,
            device=self._device,
            timeout_s=self._timeout_s if self._group is None else _GROUP_TIMEOUT_S,
            hbm_range=hbm_range,
            listener=self._listener,
            shard=self._shard,
        )

    def _open(self, parts: Mapping[str, bytes]) -> pb.OpenNamespaceReply:
        request = pb.OpenNamespaceRequest(
            token=self._reply.token,
            parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in parts.items()],
        )
        reply: pb.OpenNamespaceReply = self._rpc.call("OpenNamespace", request, self._timeout_s)
        return reply

    def _open_patiently(self, parts: Mapping[str, bytes]) -> pb.OpenNamespaceReply:
        """As `_open`; a daemon that is being restarted is asked again until the time-out."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._open(parts)
            except (Unavailable, Unauthenticated):
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _reopen(self) -> None:
        """Opens every namespace again: a restarted daemon does not know which ones this session may use."""
        with self._opening:
            for namespace in self._namespaces.values():
                reply = self._open(namespace.parts)
                namespace.reopened(reply.namespace, reply.key)

    def _detach(self) -> None:
        try:
            self._rpc.call("Detach", pb.DetachRequest(token=self._reply.token), self._timeout_s)
        except KvstoreError as error:  # the daemon sees the process end instead
            _LOG.info("detach: %s", error)
