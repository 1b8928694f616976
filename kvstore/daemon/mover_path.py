"""One NVMe path in service: feeds its mover, takes the answers, commits what became durable.

A write counts for the store once its bytes are on the medium (`Durability.POWER`: after the mover's fdatasync), and
is then entered into the durable index by a group commit in a thread, at most every 20 ms. Reads count at once. A mover
that dies fails all that it had, after its pidfd has fired; another is started. One that answers nothing for long is
killed; long before that the store is told that it hangs (`tiering.paths`), and everything else goes on. A disk that
fails all that it is given is paused by the store (`kvstore.tiering.health`). Owner loop only.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability, NvmeThrottle
from kvstore.daemon.group_sync import Counted, GroupSync
from kvstore.daemon.index_writer import IndexWriter
from kvstore.daemon.kept import Kept
from kvstore.daemon.lateness import late_after
from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory
from kvstore.daemon.nvme import OpenPath, SlabTable
from kvstore.daemon.outstanding import Outstanding, longest_answer_s
from kvstore.daemon.owner import Owner
from kvstore.daemon.path_slabs import PathSlabs
from kvstore.daemon.path_voice import PathVoice
from kvstore.daemon.slab_answers import SlabAnswers
from kvstore.daemon.space import PathSpace
from kvstore.errors import KvstoreError, Unavailable
from kvstore.faults import FAULT_VARIABLE, fault
from kvstore.layout import Columns, Tier
from kvstore.mover.link import MoverLink
from kvstore.moves import MoveKind
from kvstore.wire import mover as wire
from tiers.nvme.slab import SlabFile

__all__ = ["MoverPath", "StartLink"]

_LOG = Log("mover")
_HANGS_S = 3.0
"""Without any answer: longer than a busy disk ever takes, shorter than a request should wait."""
_REAP_WARN_S = 10.0
_STALL_KILL_S = 60.0
_WATCH_S = 0.5
_FIRST_DELAY_S = 0.1
_LAST_DELAY_S = 5.0
_STEADY_S = 10.0
_REAP_S = 0.5
_STARVED_RETRY_S = 0.05


class StartLink(Protocol):
    """Starts a mover: `MoverLink.start`, or one that is no process."""

    def __call__(self, config: wire.Config, *, lock_fd: int | None = None) -> MoverLink:
        """See MoverLink.start."""
        ...


class MoverPath:
    """The mover of one path and what goes through it."""

    def __init__(
        self,
        *,
        number: int,
        owner: Owner,
        kept: Kept,
        memory: Memory,
        columns: Columns,
        slabs: SlabTable,
        opened: OpenPath,
        space: PathSpace,
        start_link: StartLink = MoverLink.start,
    ) -> None:
        self.number = number
        self.opened = opened
        self.space = space
        self._start_link = start_link
        self.counts: wire.Counts | None = None
        self._owner = owner
        self._kept = kept
        self._memory = memory
        self._link: MoverLink | None = None
        self._announced = False
        """Whether the mover is in the keeper and has every extent: before that nothing may be sent to it."""
        self._waiting_moves: NDArray[np.void] | None = None
        self.outstanding = Outstanding()
        self.hangs = False
        """Whether its disk does not answer."""
        self._group = GroupSync(owner.config.durability)
        self._flushing: dict[int, asyncio.Future[None]] = {}
        """Syncs that a flush waits for, by id."""
        self.index = IndexWriter(number=number, owner=owner, columns=columns, slabs=slabs, opened=opened)
        self.voice = PathVoice(owner, number, opened.directory.path)
        self._slabs = PathSlabs(columns=columns, table=slabs, directory=opened.directory, index=self.index)
        self.slab_answers = SlabAnswers(
            owner=owner, columns=columns, table=slabs, index=self.index, voice=self.voice
        )
        self._lost: dict[int, int] = {}  # numbers of slabs that were deleted, by extent
        self._ended = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the process

    async def run_forever(self) -> None:
        """Keeps a mover running."""
        delay_s = _FIRST_DELAY_S
        while True:
            started_s = time.monotonic()
            try:
                self.slab_answers.lost(await self.slab_answers.deleted(self.opened.directory))
                self._start()
                await self._kept.add({f"mover-{self.number}": self._require_link().pidfd})
                self._announce()
                await self._until_ended()
            except (KvstoreError, OSError) as error:
                _LOG.warning("mover not started", path=self.number, error=error)
            await self._bury()
            if time.monotonic() - started_s > _STEADY_S:
                delay_s = _FIRST_DELAY_S
            self._owner.counters.add("mover_restarts_total")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def _start(self) -> None:
        config = self._owner.config
        bounds = config.nvme_throttle or NvmeThrottle()
        link = self._start_link(
            wire.Config(
                directory=str(self.opened.directory.path),
                threads=config.nvme_threads,
                read_bytes_per_s=bounds.read_bytes_per_s,
                write_bytes_per_s=bounds.write_bytes_per_s,
                read_operations_per_s=bounds.read_operations_per_s,
                write_operations_per_s=bounds.write_operations_per_s,
                slabs_bytes=self.space.slabs_bytes,
                ahead_ms=self._owner.ahead_ms,
            ),
            lock_fd=self.opened.directory.lock_fd,
        )
        self._link, self._announced = link, False
        self._ended.clear()
        self._slabs.forget()
        self.voice.mover_started(link.pid)

    def _announce(self) -> None:
        """The mover is in the keeper: from now on it may touch memory."""
        link = self._require_link()
        for info, fd in self._memory.extents(Tier.DRAM):
            link.send_extent(info.extent, info.nbytes, fd)
        self._announced = True
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable)
        self._update_writer()
        self.pump()

    def _require_link(self) -> MoverLink:
        assert self._link is not None
        return self._link

    @property
    def in_service(self) -> bool:
        """Whether there is a mover that takes work."""
        return self._working() is not None

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not len(self.outstanding) and self._group.idle

    @property
    def answers(self) -> bool:
        """Whether it is in service, takes writes, and its disk has not kept it waiting for long."""
        link = self._working()
        return link is not None and not self.hangs and not self.writes_paused

    @property
    def writes_paused(self) -> bool:
        """Whether its disk fails all that it is to write."""
        return self._owner.store.health(self.number).writes.paused

    def _working(self) -> MoverLink | None:
        """The mover that takes work; None while there is none, it is only starting, or it is dying."""
        link = self._link
        return link if link is not None and self._announced and not link.ended else None

    async def _until_ended(self) -> None:
        """Returns when the mover is dying; watches for a disk that hangs."""
        link = self._require_link()
        while (late_s := await late_after(_WATCH_S, self._ended)) is not None:
            link.not_watched(late_s)
            stalled_s = link.stalled_s()
            stalled_s -= longest_answer_s(self._owner.config.nvme_throttle)
            if stalled_s > _HANGS_S:
                self._disk_hangs()
            else:
                self._disk_answers()
            if stalled_s > _STALL_KILL_S:
                _LOG.warning("mover killed: its disk does not answer", path=self.number, pid=link.pid)
                self._owner.counters.add("nvme_hung_movers_killed_total")
                link.kill()

    def _disk_hangs(self) -> None:
        if not self.hangs:
            self.hangs = True
            self._owner.store.paths.hangs(self.number)
            self.voice.say_hangs()
            self._owner.settle_soon()

    def _disk_answers(self) -> None:
        if self.hangs:
            self.hangs = False
            self._owner.store.paths.answers(self.number)
            self.voice.say_answers()
            self._owner.settle_soon()

    async def _bury(self) -> None:
        """Waits until the dead mover certainly touches nothing, then fails what it had."""
        link, self._link = self._link, None
        if link is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(link.fileno())
        loop.remove_writer(link.fileno())
        link.stop()
        await self._exit_of(link)
        os.environ.pop(FAULT_VARIABLE, None)  # a fault that a test asked for is for one life
        self._kept.remove([f"mover-{self.number}"])
        code = link.reap(_REAP_S)
        self.voice.mover_ended(code)
        self.outstanding.lost()
        self.hangs = False
        self.voice.settled("stall")
        self._waiting_moves = None
        self._group.lost()
        for waiting in self._flushing.values():
            waiting.set_exception(Unavailable("the mover died"))
        self._flushing.clear()
        self._owner.store.mover_dead(self.number, self._owner.now_ms())
        self.slab_answers.lost(self._lost)
        self._lost.clear()
        self._owner.settle_soon()

    async def _exit_of(self, link: MoverLink) -> None:
        """Returns when the process has ended, however long its disk holds on to it."""
        loop = asyncio.get_running_loop()
        topic = f"dying-{self.number}"
        exited = asyncio.Event()
        loop.add_reader(link.pidfd, exited.set)
        try:
            while not exited.is_set():
                try:
                    await asyncio.wait_for(exited.wait(), _REAP_WARN_S)
                except TimeoutError:
                    link.kill()
                    path = self.opened.directory.path
                    self._owner.warnings[topic] = f"nvme path {path} is out of service: its disk hangs"
        finally:
            loop.remove_reader(link.pidfd)
            self._owner.warnings.pop(topic, None)

    async def close(self) -> None:
        """The daemon ends: the mover finishes what runs and exits by itself; the index is closed."""
        if self._link is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._link.fileno())
            loop.remove_writer(self._link.fileno())
            self._link.stop()
            self._link = None
        await self.space.close()
        await self.index.close()

    async def abandon(self) -> None:
        """As `close`, for a start that failed: a directory that was new is left as it was found."""
        link, self._link = self._link, None
        if link is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(link.fileno())
            loop.remove_writer(link.fileno())
            link.kill()
            if await asyncio.to_thread(link.reap, _REAP_S) is None:  # it may still write to the directory
                return
        await self.index.abandon()

    # ------------------------------------------------------------ work out

    def extent_added(self, extent: int, nbytes: int, fd: int) -> None:
        """A new DRAM extent, which moves may name from now on."""
        link = self._working()
        if link is None:
            return  # it is sent all of them when it is announced
        try:
            link.send_extent(extent, nbytes, fd)
        except (KvstoreError, OSError) as error:
            # Without this extent it would refuse the moves that name it; the next mover is given all of them.
            _LOG.warning("mover killed: it cannot be given an extent", path=self.number, error=error)
            link.kill()
        self._update_writer()

    def extent_dropped(self, extent: int) -> None:
        """The memory of a DRAM extent was given back: no move names it, and none will."""
        link = self._working()
        if link is None:
            return
        try:
            link.send_drop(Tier.DRAM, extent)
        except KvstoreError as error:
            _LOG.warning("mover killed: it cannot let go of an extent", path=self.number, error=error)
            link.kill()
        self._update_writer()

    def pump(self, writes: int = 0) -> int:
        """Sends reads, and up to `writes` writes, as far as the mover has room; commits. How many writes it took."""
        link = self._working()
        if link is None:
            self.index.start()
            return 0
        taken = 0
        while link.room:
            moves = self._waiting_moves
            if moves is None:
                early = self.outstanding.early_room
                moves = self._owner.store.take_moves(self.number, link.room, writes - taken, early)
                taken += int(np.count_nonzero(moves["kind"] == MoveKind.WRITE)) if len(moves) else 0
            self._waiting_moves = None
            if not len(moves):
                break
            self._waiting_moves = moves  # whatever fails in between, they are not lost
            if not self._slabs.open(moves, link):
                break
            sent = link.send_moves(moves) if not link.wants_write else 0
            self.outstanding.sent(moves[:sent], time.monotonic())
            self._waiting_moves = moves[sent:] if sent < len(moves) else None
            if self._waiting_moves is not None:
                break
        self._update_writer()
        self._sync_or_commit()
        self.space.promise_soon()
        return taken

    def delete_slab(self, extent: int, file: SlabFile) -> bool:
        """Has the mover delete a slab that no extent has any more; False where there is no mover to have it open.

        Raises Unavailable while one starts or ends, ResourceExhausted.
        """
        link = self._working()
        if link is not None:
            self._slabs.delete(extent, file, link)
            self._update_writer()
            return True
        if self._link is not None:
            raise Unavailable(f"the mover of {self.opened.directory.path} is only starting, or ending")
        return False

    def size_changed(self) -> None:
        """The path has another size: index and mover are told its bounds."""
        self.index.resize(self.space.map_bytes)
        link = self._working()
        if link is not None:  # another is told when it is started
            try:
                link.send_limit(self.space.slabs_bytes)
            except KvstoreError as error:
                _LOG.warning("mover killed: it cannot be told its size", path=self.number, error=error)
                link.kill()
            self._update_writer()

    def _update_writer(self) -> None:
        link = self._working()
        if link is None:
            return
        loop = asyncio.get_running_loop()
        if link.starved:  # the socket is writable all the time: ask again by the clock
            loop.remove_writer(link.fileno())
            if self._retry is None:
                self._retry = loop.call_later(_STARVED_RETRY_S, self._try_again)
        elif link.wants_write or (self._waiting_moves is not None and not self._slabs.waits):
            loop.add_writer(link.fileno(), self._writable)
        else:
            loop.remove_writer(link.fileno())

    def _try_again(self) -> None:
        self._retry = None
        if self._working() is not None:
            self._writable()

    def _writable(self) -> None:
        link = self._require_link()
        link.flush()
        self.pump()

    # ------------------------------------------------------------ answers in

    def _readable(self) -> None:
        link = self._require_link()
        messages = link.receive()
        # Why moves failed comes before that they did: their replies stand first, joined.
        for message in sorted(messages, key=lambda message: isinstance(message, wire.Replies)):
            self._take(message)
        if link.ended:
            asyncio.get_running_loop().remove_reader(link.fileno())
            self._ended.set()
        self._owner.settle_soon()

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Replies():
                self._take_replies(message.replies)
            case wire.Synced():
                self._take_synced(message)
            case wire.SlabOpened():
                self.slab_answers.opened(message)
            case wire.SlabFailed():
                self._slabs.failed(message.extent, message.number)
                self.slab_answers.failed(message)
            case wire.SlabLost():
                self._lost[message.extent] = message.number
            case wire.Notice():
                self.voice.notice(message.text)
            case wire.Counts():
                self.counts = message
            case _:
                _LOG.debug("message", path=self.number, kind=type(message).__name__)

    def _take_replies(self, replies: NDArray[np.void]) -> None:
        ids, statuses = replies["id"].astype(np.uint64), replies["status"].astype(np.uint8)
        self._disk_answers()
        statuses = self._owner.store.watching.learn(
            self.number, ids, statuses, replies["checksum"].astype(np.uint64)
        )
        is_write = self.outstanding.ended(ids, time.monotonic())
        self._done(self._group.answered(ids, statuses, is_write))

    def _done(self, counted: Counted) -> None:
        if len(counted.ids):
            fault("move.reply")
            self._owner.store.moves_done(
                now_ms=self._owner.now_ms(), path=self.number, ids=counted.ids, statuses=counted.statuses
            )
            self.voice.say_health()
            self.index.due()
            self._owner.settle_soon()

    def _take_synced(self, synced: wire.Synced) -> None:
        waiting = self._flushing.pop(synced.id, None)
        if waiting is not None and synced.text:
            waiting.set_exception(KvstoreError(synced.text))
        elif waiting is not None:
            waiting.set_result(None)
        if synced.text:
            counted = self._group.failed(synced.text, self.outstanding.newest)
            what = self._group.doubt or synced.text
            self.voice.complain("sync", f"nvme path {self.opened.directory.path}: {what}")
            self._done(counted)
        elif waiting is None:
            self.voice.settled("sync")
            self._done(self._group.went_well())

    def _sync_or_commit(self) -> None:
        link = self._working()
        if link is not None and (number := self._group.next_sync()) is not None:
            link.send_sync(number)
        self.index.start()

    async def make_durable(self) -> None:
        """Returns when everything that the store counts as written survives what it shall (Durability).

        Raises KvstoreError where the medium says no, Unavailable while there is no mover.
        """
        link = self._working()
        if link is None:
            raise Unavailable("out of service")
        if self._owner.config.durability is not Durability.NONE:
            await self._sync_all(link)
        await self.index.catch_up()
        if self._owner.config.durability is Durability.PROCESS:
            await self.index.flush()

    async def _sync_all(self, link: MoverLink) -> None:
        """A sync of its own, which also finds out whether a slab was deleted: no sync of a group may be due."""
        number = self._group.new_id()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushing[number] = done
        link.send_sync(number)
        self._update_writer()
        await done
        if self._group.doubt:
            raise KvstoreError(self._group.doubt)
        lost = await self.slab_answers.deleted(self.opened.directory)
        if lost and (working := self._working()) is not None:
            self._lost |= lost
            working.kill()  # so that nothing moves in them when their blocks end
        if lost or self._lost:  # or the mover has found some, and is about to end
            raise KvstoreError("slabs were deleted")
