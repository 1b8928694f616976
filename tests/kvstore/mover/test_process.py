"""The mover process, driven over its socket as the daemon does."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import AlreadyExists
from kvstore.layout import Tier
from kvstore.mover.link import MoverLink
from kvstore.mover.queue import WorkQueue
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from tests.tiers.harness import DRAM, NVME, SLABS, SLOT_BYTES, Harness
from tiers.dram import DramTier
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.trailer import checksum

Start = Callable[..., MoverLink]
_DEADLINE_S = 30.0


def wait_for(link: MoverLink, kind: type, count: int = 1) -> list[wire.Message]:
    """All messages until `count` of `kind` have come (replies count their records), or the mover ended."""
    messages: list[wire.Message] = []
    deadline = time.monotonic() + _DEADLINE_S
    seen = 0
    while seen < count and not link.ended:
        left = deadline - time.monotonic()
        assert left > 0, f"no {kind.__name__} in {_DEADLINE_S} s; got {messages}"
        select.select([link], [link] if link.wants_write else [], [], left)
        link.flush()
        for message in link.receive():
            messages.append(message)
            if isinstance(message, kind):
                seen += len(message.replies) if isinstance(message, wire.Replies) else 1
    return messages


def statuses(messages: list[wire.Message]) -> dict[int, int]:
    """Status by move id."""
    found: dict[int, int] = {}
    for message in messages:
        if isinstance(message, wire.Replies):
            found |= dict(
                zip(message.replies["id"].tolist(), message.replies["status"].tolist(), strict=True)
            )
    return found


def wait_dead(link: MoverLink) -> int:
    """Exit code, once the pidfd has fired."""
    assert select.select([link.pidfd], [], [], _DEADLINE_S)[0], "the mover did not end"
    code = link.reap(_DEADLINE_S)
    assert code is not None
    return code


@pytest.fixture
def memory() -> Iterator[DramTier]:
    made = DramTier()
    made.create(DRAM, 64 * SLOT_BYTES)
    yield made
    made.close()


@pytest.fixture
def harness(memory: DramTier) -> Iterator[Harness]:
    made = Harness(memory, np.random.default_rng(7))
    yield made
    del made.bytes


@pytest.fixture
def start(memory: DramTier, tmp_path: Path) -> Iterator[Start]:
    links: list[MoverLink] = []

    def begin(*, lock_fd: int | None = None, max_outstanding: int = 1024, **config: object) -> MoverLink:
        settings = {"directory": str(tmp_path), "threads": 2} | config
        link = MoverLink.start(
            wire.Config(**settings),  # type: ignore[arg-type]
            lock_fd=lock_fd,
            max_outstanding=max_outstanding,
        )
        links.append(link)
        link.send_extent(DRAM, 64 * SLOT_BYTES, memory.descriptor(DRAM))
        link.send_slab(NVME, 1, SLABS, SLOT_BYTES)
        return link

    yield begin
    for link in links:
        if link.pidfd >= 0:
            link.kill()
            link.stop()
            link.reap(_DEADLINE_S)


def test_blocks_go_down_and_come_back(start: Start, harness: Harness) -> None:
    link = start()
    expected = [harness.fill(slot) for slot in range(32)]
    assert link.send_moves(harness.moves_for(list(range(32)))) == 32
    assert set(statuses(wait_for(link, wire.Replies, 32)).values()) == {MoveStatus.OK}
    link.send_sync(11)
    synced = wait_for(link, wire.Synced)[-1]
    assert synced == wire.Synced(id=11)
    assert link.send_moves(harness.moves_back(list(range(32)))) == 32
    assert set(statuses(wait_for(link, wire.Replies, 32)).values()) == {MoveStatus.OK}
    for slot in range(32):
        assert np.array_equal(harness.bytes[slot + 32], expected[slot])
    assert (link.outstanding, link.syncs, link.stalled_s()) == (0, 0, 0.0)
    link.stop()
    assert wait_dead(link) == 0


def test_every_write_is_answered_although_replies_wait_for_each_other(start: Start, harness: Harness) -> None:
    # Replies of writes are held while there is more to do; those of the last pieces must not stay held.
    link = start(threads=1)
    scattered = list(range(0, 42, 2))  # in fewer pieces than there may be held replies
    for slot in scattered:
        harness.fill(slot)
    assert link.send_moves(harness.moves_for(scattered)) == len(scattered)
    found = statuses(wait_for(link, wire.Replies, len(scattered)))
    assert len(found) == len(scattered)
    assert set(found.values()) == {MoveStatus.OK}


def test_checks_beside_moves_are_each_answered(start: Start, harness: Harness) -> None:
    """One batch of writes, reads and checks of DRAM, in any order: a check names no slab, and is no piece's part."""
    link = start()
    blocks = {slot: harness.fill(slot) for slot in range(6)}
    assert link.send_moves(harness.moves_for([0, 1])) == 2
    wait_for(link, wire.Replies, 2)
    writes, checks, reads = harness.moves_for([2, 3]), harness.moves_for([4, 5]), harness.moves_back([0, 1])
    checks["kind"], checks["nvme_extent"] = MoveKind.VERIFY, 9
    for at, batch in enumerate((writes, checks, reads)):
        batch["id"] = 10 * at + np.arange(2)
    assert link.send_moves(np.concatenate([writes, checks, reads])) == 6
    messages = wait_for(link, wire.Replies, 6)
    assert statuses(messages) == dict.fromkeys([0, 1, 10, 11, 20, 21], MoveStatus.OK)
    replies = np.concatenate([message.replies for message in messages if isinstance(message, wire.Replies)])
    for number, slot in ((10, 4), (11, 5)):
        found = replies["checksum"][replies["id"] == number].tobytes()
        assert found == checksum(memoryview(blocks[slot]))


def test_replies_of_many_pieces_come_as_one_message(start: Start, harness: Harness) -> None:
    """The daemon's loop was entered once for each block, and a full disk queue cost it its answer times."""
    link = start()
    wait_for(link, wire.SlabOpened)
    assert link.send_moves(harness.moves_for(list(range(0, 40, 2)))) == 20
    assert select.select([link], [], [], _DEADLINE_S)[0]
    time.sleep(0.2)
    messages = [message for message in link.receive() if isinstance(message, wire.Replies)]
    assert len(messages) == 1
    rest = 20 - len(messages[0].replies)
    assert len(statuses(messages + (wait_for(link, wire.Replies, rest) if rest else []))) == 20


def test_it_says_what_it_is(start: Start) -> None:
    link = start(threads=3)
    messages = wait_for(link, wire.SlabOpened)
    assert wire.Ready(threads=3) in messages
    assert messages[-1] == wire.SlabOpened(extent=NVME, direct=True)


def test_a_slab_that_is_not_to_be_had_is_said(start: Start, harness: Harness) -> None:
    link = start()
    link.send_slab(NVME + 1, 2, 1 << 50, SLOT_BYTES)
    failed = wait_for(link, wire.SlabFailed)[-1]
    assert isinstance(failed, wire.SlabFailed)
    assert failed.extent == NVME + 1
    assert "no space" in failed.text
    assert not failed.exists
    moves = harness.moves_for([0])
    moves["nvme_extent"] = NVME + 1
    link.send_moves(moves)
    messages = wait_for(link, wire.Replies)
    assert list(statuses(messages).values()) == [MoveStatus.IO_ERROR]


def test_a_damaged_block_is_corrupt_and_is_said_once(start: Start, harness: Harness, tmp_path: Path) -> None:
    link = start()
    slots = list(range(4))
    for slot in slots:
        harness.fill(slot)
    link.send_moves(harness.moves_for(slots))
    wait_for(link, wire.Replies, 4)
    slab = next(tmp_path.glob("slab-*.kv"))
    with slab.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    back = harness.moves_back(slots)
    link.send_moves(back)
    messages = wait_for(link, wire.Replies, 4)
    found = statuses(messages)
    assert [found[move] for move in back["id"].tolist()] == [MoveStatus.CORRUPT, 0, 0, 0]
    notices = [message.text for message in messages if isinstance(message, wire.Notice)]
    assert len(notices) == 1
    assert "not what was written" in notices[0]


def test_what_went_through_is_counted(start: Start, harness: Harness) -> None:
    link = start()
    harness.fill(0)
    link.send_moves(harness.moves_for([0]))
    counts = wait_for(link, wire.Counts)[-1]
    while isinstance(counts, wire.Counts) and counts.written_blocks == 0:
        counts = wait_for(link, wire.Counts)[-1]
    assert isinstance(counts, wire.Counts)
    assert (counts.written_blocks, counts.written_bytes) == (1, SLOT_BYTES)


def test_what_is_out_is_bounded(start: Start, harness: Harness) -> None:
    """A queue to a disk that had stopped grew until memory was gone."""
    link = start(max_outstanding=10)
    wait_for(link, wire.SlabOpened)
    os.kill(link.pid, signal.SIGSTOP)
    moves = harness.moves_for(list(range(32)))
    assert link.send_moves(moves) == 10
    assert link.send_moves(moves[10:]) == 0
    assert link.room == 0
    time.sleep(0.05)
    assert link.stalled_s() >= 0.05
    os.kill(link.pid, signal.SIGCONT)
    assert len(statuses(wait_for(link, wire.Replies, 10))) == 10
    assert link.room == 10


def test_a_full_socket_does_not_block(start: Start, harness: Harness) -> None:
    """The daemon's loop stood still while a mover that had stopped did not read its socket."""
    link = start(max_outstanding=1 << 20)
    wait_for(link, wire.SlabOpened)
    os.kill(link.pid, signal.SIGSTOP)
    moves = np.tile(harness.moves_for(list(range(32))), 8)
    moves["id"] = np.arange(1000, 1000 + len(moves))
    sent = 0
    while (count := link.send_moves(moves)) > 0:
        sent += count
        assert sent < 1 << 20
    link.send_sync(1)
    assert link.wants_write
    assert link.room == 0
    os.kill(link.pid, signal.SIGCONT)
    messages = wait_for(link, wire.Synced)
    replies = sum(len(message.replies) for message in messages if isinstance(message, wire.Replies))
    if replies < sent:
        wait_for(link, wire.Replies, sent - replies)
    assert link.outstanding == 0


def test_kill_in_the_middle_fires_the_pidfd(start: Start, harness: Harness, tmp_path: Path) -> None:
    """After a mover had died its moves stayed under way for ever."""
    link = start()
    wait_for(link, wire.SlabOpened)
    for slot in range(32):
        harness.fill(slot)
    link.send_moves(harness.moves_for(list(range(32))))
    link.kill()
    wait_for(link, wire.Replies, 33)  # one more than there are: until its end, were it as quick as that
    assert link.ended
    assert wait_dead(link) == -signal.SIGKILL
    second = start()
    slots = list(range(32))
    second.send_moves(harness.moves_for(slots))
    assert set(statuses(wait_for(second, wire.Replies, 32)).values()) == {MoveStatus.OK}
    assert len(list(tmp_path.glob("slab-*"))) == 1


@pytest.mark.parametrize("point", ["move.start", "move.done", "mover.sync"])
def test_named_fault_points_kill(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("KVSTORE_FAULT", f"{point}:kill")
    link = start()
    harness.fill(0)
    link.send_moves(harness.moves_for([0]))
    link.send_sync(1)
    wait_for(link, wire.SlabFailed)  # which never comes
    assert wait_dead(link) == -signal.SIGKILL


def test_a_killed_write_is_never_read_as_whole(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block half overwritten by a writer that died was served as the new one."""
    monkeypatch.setenv("KVSTORE_FAULT", "move.done:kill")
    link = start(threads=1)
    new = harness.fill(0)
    link.send_moves(harness.moves_for([0]))
    wait_for(link, wire.Replies)
    wait_dead(link)
    monkeypatch.delenv("KVSTORE_FAULT")
    second = start()
    second.send_moves(harness.moves_back([0]))
    (status,) = statuses(wait_for(second, wire.Replies)).values()
    assert status == MoveStatus.OK  # the write had ended before the kill: the trailer proves it
    assert np.array_equal(harness.bytes[32], new)


def test_eof_finishes_what_runs_and_keeps_the_lock_until_then(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A restarted daemon reused disk slots that the mover of the dead one was still writing."""
    monkeypatch.setenv("KVSTORE_FAULT", "move.done:sleep=0.5")
    directory = NvmeDirectory.open(tmp_path)
    link = start(lock_fd=directory.lock_fd, threads=1)
    directory.close()
    wait_for(link, wire.SlabOpened)
    harness.fill(0)
    link.send_moves(harness.moves_for([0]))
    time.sleep(0.1)
    link.stop()
    with pytest.raises(Exception, match="in use by another kvstore daemon or its mover"):
        NvmeDirectory.open(tmp_path)
    assert wait_dead(link) == 0
    NvmeDirectory.open(tmp_path).close()


def test_the_lock_is_free_before_memory_is_unmapped(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A service that was started again at once found its disk in use while the old mover unmapped 50 GiB."""
    monkeypatch.setenv("KVSTORE_FAULT", "mover.unlocked:sleep=2")
    directory = NvmeDirectory.open(tmp_path)
    link = start(lock_fd=directory.lock_fd)
    directory.close()
    wait_for(link, wire.SlabOpened)
    link.stop()
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        try:
            NvmeDirectory.open(tmp_path).close()
        except AlreadyExists:
            time.sleep(0.02)
            continue
        break
    assert not select.select([link.pidfd], [], [], 0)[0], "it still unmaps"
    assert wait_dead(link) == 0


def test_signals_for_the_daemon_do_not_end_it(start: Start, harness: Harness) -> None:
    """Ctrl-C and a service manager's SIGTERM reached the movers too, and the drain lost what it was to flush."""
    link = start()
    wait_for(link, wire.SlabOpened)
    os.kill(link.pid, signal.SIGTERM)
    os.kill(link.pid, signal.SIGINT)
    assert os.getsid(link.pid) != os.getsid(0)
    link.send_moves(harness.moves_for([0]))
    assert set(statuses(wait_for(link, wire.Replies)).values()) == {MoveStatus.OK}


def test_drop_gives_the_room_back(start: Start, tmp_path: Path, harness: Harness) -> None:
    link = start()
    wait_for(link, wire.SlabOpened)
    link.send_drop(Tier.NVME, NVME)
    link.send_drop(Tier.DRAM, DRAM)
    link.send_moves(harness.moves_for([0]))
    assert list(statuses(wait_for(link, wire.Replies)).values()) == [MoveStatus.IO_ERROR]
    assert list(tmp_path.glob("slab-*")) == []


def test_reads_overtake_writes_and_writes_are_not_starved() -> None:
    queue = WorkQueue(most=2)
    taken: list[str] = []
    for i in range(20):
        queue.put_write(lambda i=i: taken.append(f"w{i}"))  # type: ignore[misc]
        queue.put_read(lambda i=i: taken.append(f"r{i}"))  # type: ignore[misc]
    queue.put_sync(lambda: taken.append("sync"))
    for _ in range(10):
        job = queue.get()
        assert job is not None
        job()
        if taken[-1].startswith("r"):
            queue.read_done()
    assert taken == ["sync", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "w0", "r7"]
    queue.close()
    assert queue.get() is None


def test_a_read_finds_a_thread_while_writes_run() -> None:
    """Prefetched writes to a slow disk took every thread, and a request waited for all of them."""
    queue = WorkQueue(most=1)
    taken: list[str] = []
    for name in ("w0", "w1"):
        queue.put_write(lambda name=name: taken.append(name))  # type: ignore[misc]
    for _ in range(2):
        job = queue.get()
        assert job is not None
        job()
        if taken == ["w0"]:
            queue.put_read(lambda: taken.append("r0"))
    assert taken == ["w0", "r0"]
    queue.write_done()
    job = queue.get()
    assert job is not None
    job()
    assert taken == ["w0", "r0", "w1"]


def test_a_write_finds_a_thread_while_reads_run() -> None:
    """Reads that a slow or throttled disk held took every thread, and nothing was written down."""
    queue = WorkQueue(most=1)
    taken: list[str] = []
    for name in ("r0", "r1"):
        queue.put_read(lambda name=name: taken.append(name))  # type: ignore[misc]
    queue.put_write(lambda: taken.append("w0"))
    for _ in range(2):
        job = queue.get()
        assert job is not None
        job()
    assert taken == ["r0", "w0"]
    assert queue.get_now() is None
    queue.read_done()
    job = queue.get()
    assert job is not None
    job()
    assert taken == ["r0", "w0", "r1"]


def test_a_slab_that_is_slow_to_make_holds_nothing_else_up(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads the socket made slabs itself: while one was allocated every read and write stood still."""
    monkeypatch.setenv("KVSTORE_FAULT", "mover.slab:sleep=2:2")  # the second slab
    link = start()
    wait_for(link, wire.SlabOpened)
    link.send_slab(NVME + 1, 2, SLABS, SLOT_BYTES)
    waits = harness.moves_for([1])
    waits["nvme_extent"] = NVME + 1
    link.send_moves(waits)
    began_s = time.monotonic()
    expected = harness.fill(0)
    for moves in (harness.moves_for([0]), harness.moves_back([0])):
        link.send_moves(moves)
        assert list(statuses(wait_for(link, wire.Replies)).values()) == [MoveStatus.OK]
    link.send_sync(1)
    wait_for(link, wire.Synced)
    assert time.monotonic() - began_s < 1.5
    assert np.array_equal(harness.bytes[32], expected)
    messages = wait_for(link, wire.Replies)
    assert statuses(messages) == {int(waits["id"][0]): MoveStatus.OK}
    assert time.monotonic() - began_s > 1.5, "its own move waited for it"


def test_a_drop_and_a_new_slab_come_in_their_order(start: Start, harness: Harness) -> None:
    link = start()
    harness.fill(3)
    link.send_moves(harness.moves_for([3]))
    wait_for(link, wire.Replies)
    link.send_drop(Tier.NVME, NVME)
    link.send_slab(NVME, 2, SLABS, SLOT_BYTES)
    link.send_moves(harness.moves_back([3]))
    messages = wait_for(link, wire.Replies)
    assert list(statuses(messages).values()) == [MoveStatus.CORRUPT], "the new slab holds nothing"
    assert wire.SlabOpened(extent=NVME, direct=True) in messages


def test_reads_are_not_held_back_by_throttled_writes(start: Start, harness: Harness) -> None:
    link = start(threads=2, write_bytes_per_s=4 * SLOT_BYTES)
    link.send_moves(harness.moves_for([0]))
    wait_for(link, wire.Replies)
    link.send_moves(harness.moves_for([2, 4, 6, 8, 10, 12, 14, 16]))  # two seconds of writing
    reads = harness.moves_back([0])
    link.send_moves(reads)
    first = statuses(wait_for(link, wire.Replies))
    while reads["id"][0] not in first:
        assert len(first) < 6, "the read came behind the writes"
        first |= statuses(wait_for(link, wire.Replies))
    assert first[int(reads["id"][0])] == MoveStatus.OK


def test_what_waits_is_forgotten_at_eof(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover of a dead daemon went on for minutes, and its slots could not be used for so long."""
    monkeypatch.setenv("KVSTORE_FAULT", "move.start:sleep=0.3")
    link = start(threads=1)
    wait_for(link, wire.SlabOpened)
    for slot in range(0, 32, 2):
        harness.fill(slot)
        link.send_moves(harness.moves_for([slot]))  # each in a batch, so a piece, of its own
    time.sleep(0.1)
    link.stop()
    assert wait_dead(link) == 0
    monkeypatch.delenv("KVSTORE_FAULT")
    second = start()
    back = harness.moves_back(list(range(0, 32, 2)))
    second.send_moves(back)
    found = statuses(wait_for(second, wire.Replies, 16))
    assert list(found.values()).count(MoveStatus.OK) == 1
    assert list(found.values()).count(MoveStatus.CORRUPT) == 15


def test_a_mover_without_one_of_its_extents_ends(start: Start, harness: Harness) -> None:
    """A mover that could not map an extent went on, and refused the moves that named it: their blocks were given up."""
    link = start()
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    link.send_extent(DRAM + 1, 4096, fd)
    os.close(fd)
    moves = harness.moves_for([0])
    moves["dram_extent"] = DRAM + 1
    link.send_moves(moves)
    messages = wait_for(link, wire.Replies, 1)
    assert statuses(messages) == {}
    assert any("cannot be mapped" in message.text for message in messages if isinstance(message, wire.Notice))
    assert wait_dead(link) == 0


def test_what_a_mover_said_before_it_ended_is_heard(start: Start, harness: Harness) -> None:
    """The kernel answers the first read after such an end with a reset, and the last words behind it were lost."""
    link = start()
    wait_for(link, wire.SlabOpened)
    os.kill(link.pid, signal.SIGSTOP)
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    link.send_extent(DRAM + 1, 4096, fd)
    os.close(fd)
    for _ in range(16):
        link.send_moves(harness.moves_for([0]))  # some of these stay unread
    os.kill(link.pid, signal.SIGCONT)
    assert select.select([link.pidfd], [], [], _DEADLINE_S)[0]
    messages = wait_for(link, wire.Synced)  # which never comes
    assert any("cannot be mapped" in message.text for message in messages if isinstance(message, wire.Notice))


def test_a_message_that_is_none_ends_the_mover_at_once(start: Start) -> None:
    """A mover that failed at a message stayed as a process, because its threads waited for work."""
    link = start()
    wait_for(link, wire.SlabOpened)
    began_s = time.monotonic()
    link._sock.send(b"nonsense")
    assert wait_dead(link) == 1
    assert time.monotonic() - began_s < 5.0
