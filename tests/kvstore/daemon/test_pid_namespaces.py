"""Engines and daemon in different containers: a pid means nothing there, a pidfd does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.cli.serve import keeper_command
from kvstore.client.rpc import Rpc
from kvstore.daemon.liveness import same_process
from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.conftest import MemberProcess
from tests.support.daemon import DEADLINE_S, Service, children, small_config, started, wait_for
from tests.support.raw_client import RawClient

# The first process of its own pid namespace, with a /proc to match; it dies with the one that made it.
WITHIN = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

MakeMember = Callable[..., MemberProcess]


@pytest.fixture(scope="module", autouse=True)
def namespaces_can_be_made() -> None:
    """Skips where the machine has no `unshare` or does not let us make namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` (util-linux) on this machine")
    tried = subprocess.run([*WITHIN, "true"], capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        pytest.skip(f"pid namespaces cannot be made here: {tried.stderr.strip()}")


def test_a_member_in_another_pid_namespace_dies_like_any_other(member: MakeMember, service: Service) -> None:
    """A server looked for the pid that a client in a container had told: some process of that number always lived."""
    worker = member(within=WITHIN)
    assert worker.report["pid"] == 1, "in its own eyes it is the first process"
    time.sleep(0.5)
    assert service.tier("hbm").held_slots == 16
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    tier = service.tier("hbm")
    assert (tier.held_slots, tier.filling_slots, tier.sealed_slots, tier.orphan_slots) == (0, 0, 10, 10)


def test_a_restarted_daemon_still_tells_it_from_others(tmp_path: Path) -> None:
    """The keeper holds its pidfd, not its pid: the next daemon sees it live, and then sees it die."""
    with started(small_config(tmp_path)) as service:
        worker = MemberProcess(service.socket, within=WITHIN)
        try:
            service.kill_daemon()
            time.sleep(0.5)
            assert service.tier("hbm").held_slots == 16, "it lives"
            worker.kill()
            wait_for("the end of the session", lambda: not service.stats().sessions)
            assert service.tier("hbm").held_slots == 0
            assert service.faults() == []
        finally:
            worker.close()


@contextmanager
def started_within(folder: Path) -> Iterator[Service]:
    """A service whose processes are in a pid namespace of their own: it sees no process of ours."""
    config, log = small_config(folder), folder / "kv.log"
    with log.open("ab") as out:
        process = subprocess.Popen([*WITHIN, *keeper_command(config)], stdout=out, stderr=out)
    service = Service(config=config, process=process, log=log, rpc=Rpc(config.socket))
    try:
        wait_for("a ready daemon", lambda: service.alive() and service.stats().ready)
        yield service
    finally:
        for pid in children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            service.rpc.close()


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> Iterator[Service]:
    """A service in another pid namespace."""
    (folder / "e").mkdir(mode=0o700)
    with started_within(folder / "e") as service:
        yield service


def detached(service: Service, client: RawClient) -> None:
    """Ends a client's session."""
    client.stub.Detach(pb.DetachRequest(token=client.token), timeout=DEADLINE_S)
    client.close()
    wait_for("no session", lambda: not service.stats().sessions)


def test_a_daemon_that_sees_no_pid_frees_the_slots_of_the_dead(elsewhere: Service) -> None:
    worker = MemberProcess(elsewhere.socket)
    try:
        time.sleep(0.5)
        assert elsewhere.tier("hbm").held_slots == 16
        worker.kill()
        wait_for("the end of the session", lambda: not elsewhere.stats().sessions)
        assert elsewhere.tier("hbm").held_slots == 0
        assert elsewhere.faults() == []
    finally:
        worker.close()


def test_no_other_process_takes_the_place_of_a_member_that_lives(elsewhere: Service) -> None:
    """All pids of another namespace read as 0: any process was taken for the member whose connection was lost."""
    one = RawClient(elsewhere.socket).begin()
    assert one.connection is not None
    one.connection.close()
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:  # also after the daemon has seen the end of the connection
                assert isinstance(one.hello(pid=other.pid)[-1], wire.Refused)
        finally:
            other.kill()
    detached(elsewhere, one)


def test_a_member_of_another_namespace_may_come_back(elsewhere: Service) -> None:
    own = os.pidfd_open(os.getpid())
    numbered = os.fstat(own).st_dev != os.fstat(eventfd := os.eventfd(0)).st_dev
    os.close(own)
    os.close(eventfd)
    if not numbered:
        pytest.skip("before Linux 6.9 nothing tells two processes of another namespace apart")
    one = RawClient(elsewhere.socket).begin()
    assert one.connection is not None
    one.connection.close()
    wait_for("ready again", lambda: isinstance(one.hello()[-1], wire.Ready))
    detached(elsewhere, one)


def test_pidfds_of_one_process_are_the_same_and_no_others() -> None:
    own, again, parent = (os.pidfd_open(pid) for pid in (os.getpid(), os.getpid(), os.getppid()))
    with subprocess.Popen(["true"]) as child:
        dead, dead_again = os.pidfd_open(child.pid), os.pidfd_open(child.pid)
        child.wait(DEADLINE_S)
    try:
        assert same_process(own, again)
        assert not same_process(own, parent)
        assert not same_process(dead, dead_again), "nobody who is dead presents himself"
        assert not same_process(own, dead)
    finally:
        for fd in (own, again, parent, dead, dead_again):
            os.close(fd)
