"""Opens a block manager over a running daemon, with what it needs around it, and closes it in the right order.

Attaching (the device's context, the copy kernels, the daemon's answer, mapping DRAM and HBM) needs the driver and no
torch, so a thread of its own does it while an engine imports torch and loads its weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.budget import device_spec
from engine_adapter.copying.copier import Copier, TwinCopier
from engine_adapter.group.copier import GroupCopier
from engine_adapter.group.members import MemberGroup
from engine_adapter.loading.choice import ChoiceSettings
from engine_adapter.loading.layer_groups import LayerGroups
from kvstore.cache_use import CacheUse
from kvstore.client import Client, Compares, DramListener, Session, connect
from kvstore.geometry import Geometry

__all__ = ["PendingBlockManager", "StorePlan", "begin_block_manager", "open_block_manager"]

_LOG = logging.getLogger("kvstore.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """What `open_block_manager` opens; there are its arguments."""

    socket: str | Path | None
    name: str
    geometry: Geometry
    parts: Mapping[str, bytes]
    hbm_bytes: int
    device: str = "cpu"
    patience_s: float = 5.0
    away_s: float = 30.0
    timeout_s: float = 5.0
    group: MemberGroup | None = None
    loads: ChoiceSettings | None = None
    use: CacheUse = CacheUse.ON
    layer_groups: LayerGroups | None = None
    """Of `begin_block_manager` alone; see KvstoreBlockManager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    session: Session
    copier: Copier
    listener: DramListener | None
    times: Mapping[str, float]


class PendingBlockManager:
    """A block manager whose session a thread attaches. One thread calls."""

    def __init__(self, plan: StorePlan, opening: Future[_Opened]) -> None:
        self._plan = plan
        self._opening = opening
        self._blocks: KvstoreBlockManager | None = None

    def result(self) -> KvstoreBlockManager:
        """Waits until the session is attached. Raises what attaching raised."""
        if self._blocks is None:
            opened, plan = self._opening.result(), self._plan
            self._blocks = KvstoreBlockManager(
                opened.session,
                plan.parts,
                opened.copier,
                patience_s=plan.patience_s,
                away_s=plan.away_s,
                loads=plan.loads,
                layer_groups=plan.layer_groups,
            )
        return self._blocks

    def pin_ahead(self) -> None:
        """Has DRAM pinned that no copy has needed so far. Call when the engine is ready. After `result`."""
        from engine_adapter.copying.cuda_copier import CudaCopier

        if isinstance(listener := self._opening.result().listener, CudaCopier):
            listener.pin_ahead()

    @property
    def times(self) -> Mapping[str, float]:
        """Seconds of the parts of attaching. After `result`."""
        return self._opening.result().times


@contextmanager
def open_block_manager(
    *,
    socket: str | Path | None,
    name: str,
    geometry: Geometry,
    parts: Mapping[str, bytes],
    hbm_bytes: int,
    device: str = "cpu",
    patience_s: float = 5.0,
    away_s: float = 30.0,
    timeout_s: float = 5.0,
    group: MemberGroup | None = None,
    use: CacheUse = CacheUse.ON,
    loads: ChoiceSettings | None = None,
) -> Iterator[KvstoreBlockManager]:
    """A block manager whose pages are owned HBM, kept by the daemon at `socket`: a GPU's, or its twin for "cpu".

    `group`: the other processes, where each block is shared among several; `hbm_bytes` are those of one of them.
    `parts`: what makes the engine's KV interchangeable (kvstore/identity.py). `use`: what it does with the cache, as
    far as the service allows it. `loads`: see KvstoreBlockManager. Raises: Unavailable where no daemon listens, and
    whatever else attaching raises. At the end copies finish before the session is given up.
    """
    plan = StorePlan(
        socket=socket,
        name=name,
        geometry=geometry,
        parts=parts,
        hbm_bytes=hbm_bytes,
        device=device,
        patience_s=patience_s,
        away_s=away_s,
        timeout_s=timeout_s,
        group=group,
        use=use,
        loads=loads,
    )
    with begin_block_manager(plan) as pending:
        yield pending.result()


@contextmanager
def begin_block_manager(plan: StorePlan) -> Iterator[PendingBlockManager]:
    """As `open_block_manager`, but the caller does something else until it needs the block manager.

    What attaching raises, `result` raises. At the end attaching is waited for, and all is closed.
    """
    with (
        connect(plan.socket, timeout_s=plan.timeout_s) as client,
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstore-attach") as thread,
    ):
        opening = thread.submit(_attach, plan, client)
        try:
            yield PendingBlockManager(plan, opening)
        finally:
            if opening.exception() is None:
                opened = opening.result()
                with opened.session:
                    opened.copier.close(plan.timeout_s)


def _attach(plan: StorePlan, client: Client) -> _Opened:
    began = time.monotonic()
    copier, listener = _copier(plan.device)
    opened_at = time.monotonic()
    try:
        spec = device_spec(plan.device, plan.hbm_bytes)
        session = client.attach(
            plan.name,
            plan.geometry,
            spec,
            listener=listener,
            group=plan.group,
            use=plan.use,
            compares=Compares.LOADS
            if plan.group is None and copier.takes_sums(plan.geometry.slot_bytes)
            else Compares.NOTHING,
        )
    except BaseException:
        copier.close(plan.timeout_s)
        raise
    attached_s, mapping = time.monotonic() - opened_at, session.tables.times.seconds
    if plan.group is not None:
        copier = group_copier = GroupCopier(copier, plan.group)
        plan.group.on_copied(group_copier.copied)
    times = {
        "copier and context": opened_at - began,
        "device and daemon": max(0.0, attached_s - sum(mapping.values())),
        **mapping,
    }
    _LOG.info("attached: %s", ", ".join(f"{part} {seconds:.3f} s" for part, seconds in times.items()))
    return _Opened(session=session, copier=copier, listener=listener, times=times)


def _copier(device: str) -> tuple[Copier, DramListener | None]:
    """The copier of a device, and who pins DRAM for it."""
    if device == "cpu":
        return TwinCopier(), None
    from engine_adapter.copying.cuda_copier import CudaCopier

    copier = CudaCopier(device_spec(device, 0).index)
    return copier, copier
