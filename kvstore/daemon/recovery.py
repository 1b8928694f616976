"""How a daemon starts: from what the keeper kept, or from nothing.

With the tables of an earlier life the store is recovered in place and every descriptor is matched with what the tables
say: an extent whose descriptor is missing leaves the store, a descriptor that nothing names is let go. Sessions come
back LOST, with their members watched again, until their clients resume.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from eviction.lru import Lru
from kvstore.config import ServeConfig
from kvstore.daemon.blackbox import BLACKBOX
from kvstore.daemon.kept import Kept
from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory, descriptor_name, extent_plan
from kvstore.daemon.namespaces import NAMESPACES
from kvstore.daemon.nvme import slab_bytes
from kvstore.daemon.owner import Owner
from kvstore.daemon.session import Session
from kvstore.daemon.sessions import Member, Sessions, member_names
from kvstore.daemon.sizes import Sizes
from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.faults import fault
from kvstore.layout import Columns, TableShape, Tier, open_columns, read_shape, table_bytes
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.tables.extents import TRAILER_BYTES
from tiers.memfd import create_memfd

__all__ = [
    "SECRET",
    "TABLES",
    "Tables",
    "match_descriptors",
    "open_tables",
    "store_limits",
    "table_shape",
    "tenant_secret",
]

TABLES = "tables-2"
"""What the keeper calls their descriptor. Of "tables" no checksum is known, and who reads those alone would give out
what nobody has looked at: each begins with new ones where it finds the other's."""
SECRET = "secret"  # noqa: S105 (what the keeper calls its descriptor)
_OTHERS = ("mover-", BLACKBOX, NAMESPACES, SECRET, Sizes.NAME, "slabs")  # matched elsewhere
_MAX_HBM_EXTENTS = 1024
_LEAST_CLEAN_SLOTS = 8
_LOG = Log("recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The shared tables and the store over them."""

    fd: int
    columns: Columns
    store: Store
    fresh: bool
    """Whether nothing was kept: then the disks are read."""


def table_shape(config: ServeConfig) -> TableShape:
    """Sizes of the tables for this configuration."""
    _, dram_extents = extent_plan(config)
    nvme_bytes = sum(path.capacity_bytes for path in config.nvme)
    # More than is needed: slabs that an earlier configuration made may be smaller, and tiers may be resized.
    nvme_extents = sum(4 * path.capacity_bytes // slab_bytes(path, config) + 2 for path in config.nvme)
    return TableShape(
        max_rows=config.max_rows,
        hbm_slots=config.devices * max(1, config.hbm_bytes // config.min_slot_bytes),
        dram_slots=max(1, config.dram_bytes // config.min_slot_bytes),
        nvme_slots=max(1, nvme_bytes // (config.min_slot_bytes + TRAILER_BYTES)),
        devices=config.devices,
        max_extents=min(65_535, _MAX_HBM_EXTENTS + 4 * dram_extents + nvme_extents),
        max_sessions=config.max_sessions,
        max_namespaces=config.max_namespaces,
    )


def store_limits(config: ServeConfig) -> StoreLimits:
    """Bounds of the store for this configuration."""
    limits = config.limits
    return StoreLimits(
        max_message_blocks=limits.chain_blocks,
        max_waiting_leases=limits.session_leases,
        canary_every=config.canary_every,
        max_writes=limits.move_queue_blocks * max(1, len(config.nvme)),
        paths=max(1, len(config.nvme)),
        reserve_fraction=config.clean_percent / 100,
        reserve_slots=_LEAST_CLEAN_SLOTS if config.clean_percent else 0,
        write_budget_bytes=config.nvme_write_budget_bytes,
        prefetch_share=config.prefetch_percent / 100,
    )


def open_tables(config: ServeConfig, inherited: Mapping[str, int], now_ms: int) -> Tables:
    """The tables that were kept, or new ones.

    Raises ResourceExhausted where memory is short.
    """
    shape = table_shape(config)
    kept = inherited.get(TABLES)
    if kept is not None:
        tables = _recover(kept, shape, config, now_ms)
        if tables is not None:
            return tables
    try:
        fd = create_memfd("kvstore-tables", table_bytes(shape))
    except ResourceExhausted as error:
        raise ResourceExhausted(
            f"no memory for the tables: {error}; raise min_slot, or lower max_rows, hbm, devices or nvme"
        ) from None
    memory = memoryview(mmap.mmap(fd, 0))
    store = Store.create(memory, shape, store_limits(config), Lru(), fault=fault)
    return Tables(fd=fd, columns=open_columns(memory, shape), store=store, fresh=True)


def _recover(fd: int, shape: TableShape, config: ServeConfig, now_ms: int) -> Tables | None:
    memory = memoryview(mmap.mmap(fd, 0))
    try:
        if read_shape(memory) != shape:
            _LOG.warning("tables dropped: the configuration has changed")
            return None
        store = Store.recover(memory, store_limits(config), Lru(), now_ms=now_ms, fault=fault)
    except KvstoreError as error:
        _LOG.warning("tables dropped", error=error)
        return None
    return Tables(fd=fd, columns=open_columns(memory, shape), store=store, fresh=False)


def match_descriptors(
    *,
    owner: Owner,
    kept: Kept,
    memory: Memory,
    sessions: Sessions,
    tables: Tables,
    inherited: Mapping[str, int],
) -> list[Member]:
    """Gives every kept descriptor to whom it belongs; returns the members that were there before.

    What belongs to nobody is closed, here and in the keeper. Movers' pidfds are left to the movers.
    """
    kept.assume(inherited)
    left = {name: fd for name, fd in inherited.items() if fd != tables.fd and not name.startswith(_OTHERS)}
    if not tables.fresh:
        _match_extents(owner, memory, left)
        members = _match_sessions(owner, sessions, tables.columns, left)
    else:
        members = []
    kept.remove(left)
    for fd in left.values():
        os.close(fd)
    if left:
        _LOG.info("descriptors dropped", count=len(left), first=min(left))
    return members


def _match_extents(owner: Owner, memory: Memory, left: dict[str, int]) -> None:
    for tier in (Tier.DRAM, Tier.HBM):
        lost = []
        for info in owner.store.extents(tier):
            fds: list[int] = []
            while (fd := left.pop(descriptor_name(tier, info.extent, len(fds)), None)) is not None:
                fds.append(fd)
            if not fds:
                lost.append(info.extent)
                owner.store.drop_extent(info.extent)
            else:
                memory.adopt(info, fds)
        if lost:
            _LOG.warning(
                "extents without their memory", tier=tier.name.lower(), count=len(lost), first=min(lost)
            )


def _match_sessions(owner: Owner, sessions: Sessions, columns: Columns, left: dict[str, int]) -> list[Member]:
    members = []
    for info in owner.store.stats().sessions:
        session = Session(
            id=info.session,
            digest=columns.session_token[info.session].tobytes(),
            name=info.name,
            device=info.device,
            slot_bytes=info.slot_bytes,
            hbm_bytes=owner.config.hbm_bytes,
            members=info.members,
            identity=info.identity,
            lost=True,
            last_sent=owner.now_ms() << 20,
        )
        owner.add_session(session)
        for number in range(info.members):
            pid_name, live_name = member_names(info.session, number)
            if pid_name in left and live_name in left:
                connection = socket.socket(fileno=left.pop(live_name))
                members.append(sessions.adopt(session, number, connection, left.pop(pid_name)))
        sessions.recovered(session)
    return members


def tenant_secret(inherited: Mapping[str, int], from_disk: bytes | None) -> tuple[bytes, int]:
    """The tenant's secret, and a descriptor that keeps it where there is no disk to keep it on.

    The disk's comes first: blocks there were hashed with it. Else that of the daemon before, else a new one.
    """
    if SECRET in inherited:
        kept = os.pread(inherited[SECRET], 64, 0)
        if from_disk in (None, kept):
            return kept, inherited[SECRET]
    secret = from_disk or secrets.token_bytes(32)
    fd = os.memfd_create("kvstore-secret", os.MFD_CLOEXEC)
    os.write(fd, secret)
    return secret, fd
