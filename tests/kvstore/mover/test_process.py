"""The mover process, driven over its socket as the daemon does."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.faults import DISK_FAULTS_VARIABLE
from kvstore.layout import Tier
from kvstore.mover.link import MoverLink
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from kvstore.wire.packed import REPLY
from tests.kvstore.mover.rig import DEADLINE_S, Start, statuses, wait_dead, wait_for
from tests.tiers.harness import DRAM, NVME, SLABS, SLOT_BYTES, Harness
from tiers.nvme.trailer import checksum


def unread_bytes(link: MoverLink) -> int:
    """What the mover has said and nobody has received."""
    return int.from_bytes(fcntl.ioctl(link.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


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
    deadline = time.monotonic() + DEADLINE_S
    while unread_bytes(link) < 20 * REPLY.itemsize:
        assert time.monotonic() < deadline, "not all are answered"
        time.sleep(0.002)
    messages = [message for message in link.receive() if isinstance(message, wire.Replies)]
    assert len(messages) == 1
    rest = 20 - len(messages[0].replies)
    assert len(statuses(messages + (wait_for(link, wire.Replies, rest) if rest else []))) == 20


def test_it_says_what_it_is(start: Start) -> None:
    link = start(threads=3)
    messages = wait_for(link, wire.SlabOpened)
    assert wire.Ready(threads=3) in messages
    assert messages[-1] == wire.SlabOpened(extent=NVME, number=1, direct=True)


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


def test_drop_gives_the_room_back(start: Start, tmp_path: Path, harness: Harness) -> None:
    link = start()
    wait_for(link, wire.SlabOpened)
    link.send_drop(Tier.NVME, NVME)
    link.send_drop(Tier.DRAM, DRAM)
    link.send_moves(harness.moves_for([0]))
    assert list(statuses(wait_for(link, wire.Replies)).values()) == [MoveStatus.IO_ERROR]
    assert list(tmp_path.glob("slab-*")) == []


def test_a_slab_that_is_slow_to_make_holds_nothing_else_up(
    start: Start, harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread that reads the socket made slabs itself: while one was allocated every read and write stood still."""
    faults = tmp_path.with_name(f"{tmp_path.name}.faults")
    monkeypatch.setenv(DISK_FAULTS_VARIABLE, str(faults))
    link = start()
    wait_for(link, wire.SlabOpened)
    faults.write_text("* make hang\n")
    link.send_slab(NVME + 1, 2, SLABS, SLOT_BYTES)
    waits = harness.moves_for([1])
    waits["nvme_extent"] = NVME + 1
    link.send_moves(waits)
    expected = harness.fill(0)
    for moves in (harness.moves_for([0]), harness.moves_back([0])):
        link.send_moves(moves)
        assert statuses(wait_for(link, wire.Replies)) == {int(moves["id"][0]): MoveStatus.OK}
    link.send_sync(1)
    assert wire.Synced(id=1) in wait_for(link, wire.Synced)
    assert np.array_equal(harness.bytes[32], expected)
    assert link.outstanding == 1, "its own move waits for it"
    faults.unlink()
    assert statuses(wait_for(link, wire.Replies)) == {int(waits["id"][0]): MoveStatus.OK}


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
    assert wire.SlabOpened(extent=NVME, number=2, direct=True) in messages


def test_reads_are_not_held_back_by_throttled_writes(start: Start, harness: Harness) -> None:
    link = start(threads=2, write_bytes_per_s=SLOT_BYTES)
    link.send_moves(harness.moves_for([0]))
    wait_for(link, wire.Replies)
    link.send_moves(harness.moves_for([2, 4, 6, 8, 10, 12, 14, 16]))  # eight seconds of writing
    reads = harness.moves_back([0])
    link.send_moves(reads)
    first = statuses(wait_for(link, wire.Replies))
    while reads["id"][0] not in first:
        assert len(first) < 6, "the read came behind the writes"
        first |= statuses(wait_for(link, wire.Replies))
    assert first[int(reads["id"][0])] == MoveStatus.OK
