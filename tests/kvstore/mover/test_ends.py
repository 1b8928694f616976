"""How a mover ends: killed, told to, or by itself; and what becomes of what it had."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import AlreadyExists
from kvstore.faults import DISK_FAULTS_VARIABLE
from kvstore.moves import MoveStatus
from kvstore.wire import mover as wire
from tests.kvstore.mover.rig import DEADLINE_S, Start, held_at, statuses, wait_dead, wait_for
from tests.tiers.harness import DRAM, Harness
from tiers.nvme.directory import NvmeDirectory


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of disk faults for `held_at`, beside the folder."""
    path = tmp_path.with_name(f"{tmp_path.name}.gate")
    monkeypatch.setenv(DISK_FAULTS_VARIABLE, str(path))
    return path


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
    start: Start, harness: Harness, gate: Path, tmp_path: Path
) -> None:
    """A restarted daemon reused disk slots that the mover of the dead one was still writing."""
    directory = NvmeDirectory.open(tmp_path)
    link = start(lock_fd=directory.lock_fd, threads=1)
    directory.close()
    wait_for(link, wire.SlabOpened)
    written = harness.fill(0)
    with held_at(gate, lambda: link.send_moves(harness.moves_for([0]))):
        link.stop()
        with pytest.raises(Exception, match="in use by another kvstore daemon or its mover"):
            NvmeDirectory.open(tmp_path)
    assert wait_dead(link) == 0
    NvmeDirectory.open(tmp_path).close()
    second = start()
    second.send_moves(harness.moves_back([0]))
    assert list(statuses(wait_for(second, wire.Replies)).values()) == [MoveStatus.OK]
    assert np.array_equal(harness.bytes[32], written)


def test_the_lock_is_free_before_memory_is_unmapped(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A service that was started again at once found its disk in use while the old mover unmapped 50 GiB."""
    monkeypatch.setenv("KVSTORE_FAULT", f"mover.unlocked:sleep={2 * DEADLINE_S}")
    directory = NvmeDirectory.open(tmp_path)
    link = start(lock_fd=directory.lock_fd)
    directory.close()
    wait_for(link, wire.SlabOpened)
    link.stop()
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            NvmeDirectory.open(tmp_path).close()
        except AlreadyExists:
            assert time.monotonic() < deadline, "the lock stays"
            time.sleep(0.02)
            continue
        break
    assert not select.select([link.pidfd], [], [], 0)[0], "it still unmaps"


def test_signals_for_the_daemon_do_not_end_it(start: Start, harness: Harness) -> None:
    """Ctrl-C and a service manager's SIGTERM reached the movers too, and the drain lost what it was to flush."""
    link = start()
    wait_for(link, wire.SlabOpened)
    os.kill(link.pid, signal.SIGTERM)
    os.kill(link.pid, signal.SIGINT)
    assert os.getsid(link.pid) != os.getsid(0)
    link.send_moves(harness.moves_for([0]))
    assert set(statuses(wait_for(link, wire.Replies)).values()) == {MoveStatus.OK}


def test_what_waits_is_forgotten_at_eof(start: Start, harness: Harness, gate: Path) -> None:
    """A mover of a dead daemon went on for minutes, and its slots could not be used for so long."""
    link = start(threads=1)
    wait_for(link, wire.SlabOpened)
    slots = list(range(0, 32, 2))

    def write_all() -> None:
        for slot in slots:
            harness.fill(slot)
            link.send_moves(harness.moves_for([slot]))  # each in a batch, so a piece, of its own

    with held_at(gate, write_all):
        tasks = Path(f"/proc/{link.pid}/task")
        threads = len(list(tasks.iterdir()))
        link.stop()
        deadline = time.monotonic() + DEADLINE_S
        while len(list(tasks.iterdir())) == threads:  # whoever waited for work ends when it has seen the end
            assert time.monotonic() < deadline, "the end of the socket is not seen"
            time.sleep(0.002)
    assert wait_dead(link) == 0
    second = start()
    second.send_moves(harness.moves_back(slots))
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
    assert select.select([link.pidfd], [], [], DEADLINE_S)[0]
    messages = wait_for(link, wire.Synced)  # which never comes
    assert any("cannot be mapped" in message.text for message in messages if isinstance(message, wire.Notice))


def test_a_message_that_is_none_ends_the_mover_at_once(start: Start) -> None:
    """A mover that failed at a message stayed as a process, because its threads waited for work."""
    link = start()
    wait_for(link, wire.SlabOpened)
    link._sock.send(b"nonsense")
    assert wait_dead(link) == 1
