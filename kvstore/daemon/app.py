"""The daemon from its first descriptor to its last: puts the parts together, starts them, ends them.

Order of a start: lock of the socket, tables (kept or new), descriptors back to whom they belong, the first DRAM extent,
sockets, READY; disks and the rest of DRAM come behind. Order of an end: streams are told, what is in DRAM goes to disk,
then everything closes. Whatever is not awaited here runs as a task of `_tasks`, and a task that ends by a fault of ours
ends the daemon: the keeper starts a sound one from the same memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from kvstore.cache_use import CacheUse
from kvstore.config import Recovery, ServeConfig
from kvstore.daemon.admin import Admin
from kvstore.daemon.blackbox import BLACKBOX, open_recorder, saved_paths
from kvstore.daemon.descriptors import DescriptorServer
from kvstore.daemon.devices import Devices, load_nvml
from kvstore.daemon.frames import FrameServer
from kvstore.daemon.kept import Kept
from kvstore.daemon.log import Log
from kvstore.daemon.machine import check_disks
from kvstore.daemon.memory import Memory, extent_plan
from kvstore.daemon.movers import Movers, PathStart
from kvstore.daemon.namespaces import NAMESPACES, Namespaces, read_beside_slabs
from kvstore.daemon.notify import Notifier
from kvstore.daemon.nvme import SlabTable, secret_on_disk
from kvstore.daemon.owner import Owner
from kvstore.daemon.policies import begin_policies, resize_policies, say_policy_faults
from kvstore.daemon.recovery import SECRET, TABLES, Tables, match_descriptors, open_tables, tenant_secret
from kvstore.daemon.resizing import Resizing
from kvstore.daemon.services import Services
from kvstore.daemon.sessions import Sessions
from kvstore.daemon.sizes import Sizes
from kvstore.daemon.sockets import Sockets
from kvstore.daemon.stream import SessionStreams
from kvstore.daemon.tenancy import Tenancy
from kvstore.daemon.transfers import Transfers
from kvstore.daemon.unary import Unary
from kvstore.errors import ConfigError, KvstoreError
from kvstore.keeper import KEEPER_PID
from kvstore.layout import Tier, latest_touch_ms
from kvstore.recorder import Event
from kvstore.units import format_count, format_size
from kvstore.wire.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.daemon.metrics import MetricsServer

__all__ = ["Daemon"]

_LOG = Log("app")
_PATHS_BEFORE_READY_S = 5.0
_PATHS_POLL_S = 0.01
_SECRET_TIMEOUT_S = 10.0
_SWEEP_S = 1.0
_STREAM_GRACE_S = 0.5
_CLOSE_S = 5.0


class Daemon:
    """One life of the daemon, on the running loop."""

    def __init__(self, config: ServeConfig, environ: Mapping[str, str], inherited: Mapping[str, int]) -> None:
        self._config = config
        self._inherited = inherited
        self._keeper_died_warning = "the keeper died and was started again"
        self._notifier = Notifier(environ.get("NOTIFY_SOCKET"))
        keeper_pid = int(environ[KEEPER_PID]) if environ.get(KEEPER_PID) else None
        saved, _ = saved_paths(config.socket)
        self._kept = Kept(self._notifier, keeper_pid, saved, self._keeper_restarted)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._signals = 0
        self._names_on_disk: bytes | None = None
        self._abandon: Callable[[float], Awaitable[None]] | None = None
        self.ready = False
        """Whether it has served: an error before that is one of the configuration or of the machine."""

    async def run(self) -> None:
        """From start to a clean end. Raises KvstoreError where it cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        sockets = Sockets(self._config)
        try:
            await self._start_or_leave(sockets)
            await asyncio.wait(
                (asyncio.ensure_future(self._stop.wait()), self._fault), return_when=asyncio.FIRST_COMPLETED
            )
            if self._fault.done():
                self._recorder.note(Event.FAULT, a=os.getpid())
                self._fault.result()
            await self._drain()
        finally:
            sockets.close()
        self._notifier.close()

    # ------------------------------------------------------------ start

    async def _start_or_leave(self, sockets: Sockets) -> None:
        try:
            await self._start(sockets)
        except KvstoreError:
            if self._abandon is not None and not self._inherited:
                for task in tuple(self._tasks):
                    task.cancel()
                await self._abandon(_CLOSE_S)
            raise

    async def _start(self, sockets: Sockets) -> None:
        secret = await self._secret()
        self._recorder, recorder_fd = open_recorder(self._config.socket, self._inherited)
        tables = open_tables(self._config, self._inherited, time.time_ns() // 1_000_000)
        if not tables.fresh:
            self._recorder.note(Event.RECOVERED, count=tables.store.stats().rows)
        tables.store.watching.record_to(self._recorder)
        self._build(tables, secret)
        self._owner.continue_after(latest_touch_ms(tables.columns.touch))
        members = match_descriptors(
            owner=self._owner,
            kept=self._kept,
            memory=self._memory,
            sessions=self._sessions,
            tables=tables,
            inherited=self._inherited,
        )
        slabs = {SlabTable.NAME: self._movers.slabs.fd}
        await self._kept.add(
            {
                TABLES: tables.fd,
                SECRET: self._secret_fd,
                BLACKBOX: recorder_fd,
                NAMESPACES: self._namespaces.fd,
                Sizes.NAME: self._sizes.fd,
                **slabs,
            }
        )
        if not self._memory.extents(Tier.DRAM):
            await self._memory.add_dram(extent_plan(self._config)[0])
        for member in members:
            self._descriptors.adopt(member)
        opened = self._start_paths()
        self._spawn(self._owner.tick_forever())
        if tables.fresh:
            await self._await_paths(opened)
        self._movers.serving = True
        self._descriptors.listen(sockets.bind_descriptors())
        await self._frames.listen(sockets.bind_streams())
        await self._services.start()
        sockets.open_to_group()
        if self._metrics is not None:
            await self._metrics.start()
        self._spawn(self._memory.grow_forever())
        self._spawn(self._resizing.dram.run_forever())
        if self._sizes.dram_bytes:
            self._resizing.dram.changed()  # an earlier daemon may have been killed before the size held
        self._spawn(self._sweep_forever())
        self._spawn(self._kept.watch_keeper())
        self._spawn(self._transfers.save_forever())
        self._devices.start()
        self._say_ready(tables, len(members))

    def _build(self, tables: Tables, secret: bytes) -> None:
        self._owner = Owner(
            store=tables.store, config=self._config, boot_epoch=time.time_ns(), recorder=self._recorder
        )
        tenancy = Tenancy(self._owner, self._namespaces)
        self._sizes = Sizes({} if tables.fresh else self._inherited)
        self._memory = Memory(self._owner, self._kept, tables.columns, self._sizes)
        self._sessions = Sessions(self._owner, self._kept)
        self._descriptors = DescriptorServer(
            owner=self._owner, sessions=self._sessions, memory=self._memory, tables_fd=tables.fd
        )
        self._devices = Devices(self._owner, self._memory, load_nvml)
        self._movers = Movers(
            owner=self._owner,
            kept=self._kept,
            memory=self._memory,
            tables=tables,
            secret=secret,
            inherited=self._inherited,
        )
        self._abandon = self._movers.abandon
        unary = Unary(
            owner=self._owner,
            sessions=self._sessions,
            memory=self._memory,
            devices=self._devices,
            movers=self._movers,
            namespaces=self._namespaces,
            tenancy=tenancy,
            keeper_pid=lambda: self._kept.keeper_pid,
        )
        begin_policies(tables.store, self._config)
        streams = SessionStreams(self._owner)
        self._resizing = Resizing(self._owner, self._memory, self._movers)
        self._transfers = Transfers(
            owner=self._owner,
            columns=tables.columns,
            slabs=self._movers.slabs,
            namespaces=self._namespaces,
        )
        self._services = Services(
            owner=self._owner,
            unary=unary,
            admin=Admin(
                owner=self._owner,
                sessions=self._sessions,
                memory=self._memory,
                movers=self._movers,
                resizing=self._resizing,
                tenancy=tenancy,
            ),
            transfers=self._transfers,
            streams=streams,
            disk_serves=self._movers.serves,
            cache_serves=lambda: tenancy.everywhere is CacheUse.ON,
        )
        self._frames = FrameServer(self._owner, streams)
        self._metrics = _metrics_server(self._config.metrics_port, unary)
        if not self._kept.survives:
            self._owner.warnings["keeper"] = "no keeper: memory does not outlive this daemon"

    async def _secret(self) -> bytes:
        try:
            on_disk = await asyncio.wait_for(asyncio.to_thread(self._look_at_disks), _SECRET_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                f"nvme: {self._config.nvme[0].path} does not answer: is its disk well?"
            ) from None
        secret, self._secret_fd = tenant_secret(self._inherited, on_disk)
        self._namespaces = Namespaces(secret, self._inherited, self._names_on_disk)
        return secret

    def _look_at_disks(self) -> bytes | None:
        """The secret and the names beside the slabs. Blocks on the disks: runs in a thread."""
        if TABLES not in self._inherited:
            check_disks(self._config)
        self._names_on_disk = read_beside_slabs([path.path for path in self._config.nvme])
        try:
            return secret_on_disk(self._config)
        except ConfigError as error:
            if SECRET not in self._inherited:
                raise
            _LOG.warning("secret not read", error=error)  # the path says so when it is opened; memory goes on
            return None

    def _start_paths(self) -> list[PathStart]:
        starts = []
        for number, path in enumerate(self._config.nvme):
            starts.append(PathStart())
            self._spawn(self._movers.run_path(number, path, starts[-1]))
        return starts

    async def _await_paths(self, starts: list[PathStart]) -> None:
        """Gives the disks a moment: so that they are ours for certain, and what little they hold is known."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _PATHS_BEFORE_READY_S
        while any(self._is_awaited(start) for start in starts) and loop.time() < until_s:
            if self._config.recovery is Recovery.STRICT and not all(start.counted for start in starts):
                until_s = loop.time() + _PATHS_BEFORE_READY_S
            if self._fault.done():
                self._fault.result()
            await asyncio.sleep(_PATHS_POLL_S)

    def _is_awaited(self, start: PathStart) -> bool:
        """Whether the start waits for more of this path. Much that lies there is found while the daemon serves."""
        if not start.ours or (self._config.recovery is Recovery.STRICT and not start.counted):
            return True
        return not start.large and not start.loaded.is_set()

    def _say_ready(self, tables: Tables, members: int) -> None:
        gc.collect()
        gc.freeze()  # what lives now lives to the end: full collections need not look at it
        self.ready = True
        self._notifier.tell("READY=1")
        config = self._config
        parts = [f"DRAM {format_size(config.dram_bytes)}"]
        parts += [f"NVMe {path}" for path in config.nvme]
        parts.append(f"{format_count(config.max_rows)} blocks")
        if config.metrics_port is not None:
            parts.append(f"metrics http://127.0.0.1:{config.metrics_port}/metrics")
        again = "" if tables.fresh else f" again with {format_count(self._owner.store.stats().rows)} known"
        print(f"kvstore ready{again} on {config.socket}: {', '.join(parts)}", flush=True)
        rows = self._owner.store.stats().rows
        self._recorder.note(Event.READY, count=rows)
        _LOG.info("ready", pid=os.getpid(), fresh=tables.fresh, members=members, rows=rows)
        saved, crash = saved_paths(config.socket)
        _LOG.info("flight recording", now="kvstore blackbox", after_end=saved, after_crash=crash)

    # ------------------------------------------------------------ running

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._fault.done():
            self._fault.set_exception(error)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._memory.sweep()
            resize_policies(
                self._owner.store.hints.rankings, self._memory.dram_bytes, self._movers.capacity_bytes
            )
            say_policy_faults(self._owner)
            self._movers.commit_soon()

    def _keeper_restarted(self) -> None:
        self._owner.counters.add("keeper_restarts_total")
        self._owner.warnings["keeper"] = self._keeper_died_warning

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._notifier.tell("STOPPING=1")
            sys.stderr.flush()
            os._exit(0)  # asked for twice: at once

    # ------------------------------------------------------------ end

    async def _drain(self) -> None:
        """Tells the streams, brings what is in DRAM to disk, closes."""
        self._owner.draining = True
        self._recorder.note(Event.DRAINING)
        self._notifier.tell("STOPPING=1")
        deadline_s = self._config.limits.drain_deadline_s
        _LOG.info("draining", deadline_s=deadline_s)
        left = 0
        for session in self._owner.sessions.values():
            session.post(draining=pb.Draining(deadline_ms=round(deadline_s * 1000)))
        if self._config.nvme:
            flushed = await self._movers.drain(deadline_s)
            _LOG.info(
                "flushed",
                durable=flushed.durable_blocks,
                left=flushed.pending_blocks,
                unfit=flushed.unfit_blocks,
            )
        self._descriptors.close()
        self._devices.close()
        if self._metrics is not None:
            self._metrics.close()
        await self._services.stop(_STREAM_GRACE_S)
        self._frames.close()
        for task in tuple(self._tasks):
            task.cancel()
        await self._movers.close(_CLOSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._transfers.save_what_is_new(), _CLOSE_S)
        self._recorder.note(Event.STOPPED, count=left)
        _LOG.info("stopped")


def _metrics_server(port: int | None, unary: Unary) -> MetricsServer | None:
    """Imported where it is asked for: the client library of Prometheus takes a tenth of the start."""
    if port is None:
        return None
    from kvstore.daemon.metrics import MetricsServer

    return MetricsServer(port, unary.stats_now)
