"""kill -9 of everything at once: files are left that the documents name, no shared memory, and the next start works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, children, small_config, start, started, wait_for

WORDS = ("kv", "hbm", "dram", "lmdb", "mover")
SYSV = Path("/proc/sysvipc/shm")


def shared_memory() -> set[str]:
    """Names in /dev/shm that could be ours, and System V segments: none of both is ever made."""
    names = {name for name in os.listdir("/dev/shm") if any(word in name.lower() for word in WORDS)}
    segments = SYSV.read_text().splitlines()[1:] if SYSV.exists() else []
    return names | {f"segment {line.split()[1]}" for line in segments}


def tree(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def kill_all(service: Service, worker: subprocess.Popen[bytes]) -> None:
    """SIGKILL of keeper, daemon, movers and worker, all of them before any could tidy up."""
    daemon, keeper = service.daemon_pid, service.keeper_pid
    pids = [keeper, daemon, *children(daemon), worker.pid]
    for pid in pids:  # nobody starts anybody again meanwhile
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    worker.wait(30)
    service.process.wait(30)
    wait_for("their end", lambda: not any(_alive(pid) for pid in pids))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_but_sockets_lock_and_disk(tmp_path: Path) -> None:
    """Servers left named shared memory behind at SIGKILL: it was gone for good until somebody removed it by hand."""
    before = shared_memory()
    temporary, place = tmp_path / "tmp", tmp_path / "kv"
    temporary.mkdir()
    place.mkdir(mode=0o700)
    environ = {**os.environ, "TMPDIR": str(temporary)}
    config = small_config(place, nvme_bytes=128 * MIB)
    service = start(config, tmp_path / "kv.log", {"TMPDIR": str(temporary)})
    service.await_ready()
    command = [sys.executable, "-m", "tests.support.worker", "--socket", config.socket, "--name", "w"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as worker:
        try:
            wait_for("blocks on disk", lambda: service.tier("nvme").sealed_slots >= 50)
            # Written is not yet durable: only what a flush has answered for is known after a kill.
            service.rpc.call("Flush", pb.FlushRequest(deadline_ms=10_000), 20.0)
        finally:
            kill_all(service, worker)
    service.rpc.close()
    assert shared_memory() == before
    assert tree(temporary) == set()
    left = tree(place)
    on_disk = {name for name in left if name.startswith("nvme/")}
    assert left - on_disk == {"kv.sock", "kv.sock.fd", "kv.sock.stream", "kv.sock.lock"}
    kinds = {Path(name).name.rstrip("0123456789") for name in on_disk}
    assert on_disk
    with started(config) as again:
        assert again.stats().rows >= 50, "what was on disk is known again"
        assert again.faults() == []
    ended = tree(place)
    assert {name for name in ended if not name.startswith("nvme/")} <= {
        "kv.sock.blackbox",
        "kv.sock.lock",
        "kv.log",
    }
    of_an_end = {"clean"}  # the index's mark of an end in order
    assert {Path(name).name.rstrip("0123456789") for name in ended if name.startswith("nvme/")} <= (
        kinds | of_an_end
    )
    assert shared_memory() == before
