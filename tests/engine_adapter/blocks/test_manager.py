"""The adapter over a real daemon: every way a request can go, and every process that can die meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.base import Admission, RequestId
from engine_adapter.copying.copier import CopyBatch, TwinCopier
from kvstore.client import connect
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.stalls import Stalls
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[Service]:
    """For tests that kill it."""
    with started(small_config(tmp_path)) as service:
        yield service


@pytest.fixture
def engine(service: Service, request: pytest.FixtureRequest) -> Iterator[Driver]:
    with attached(service.socket, request.node.name[:60]) as driver:
        yield driver
        driver.session.close()
    assert service.faults() == []


_FIRST = iter(range(1, 1 << 30))


def prompt(tokens: int) -> list[int]:
    """A prompt that nobody else has."""
    return [next(_FIRST), *range(1, tokens)]


def test_a_cold_prompt_is_a_hit_when_it_is_asked_again(engine: Driver) -> None:
    tokens = prompt(10 * B + 2)
    assert engine.run("cold", tokens) == Admission(cached_tokens=0, cached_by_tier={})
    warm = engine.run("warm", tokens)
    assert warm == Admission(cached_tokens=10 * B, cached_by_tier={"hbm": 10 * B})
    engine.await_nothing_used()


def test_a_prompt_of_exactly_k_blocks_leaves_one_block_to_compute(engine: Driver) -> None:
    """A prompt that was cached to its last token had nothing to compute, and its last shared block was written."""
    tokens = prompt(4 * B)
    engine.run("cold", tokens)
    assert engine.run("warm", tokens).cached_tokens == 3 * B


@pytest.mark.parametrize("count", [1, B - 1])
def test_a_prompt_shorter_than_a_block_is_never_cached(engine: Driver, count: int) -> None:
    """Prompts without a full block were sealed under the hash of nothing and hit each other."""
    tokens = prompt(count)
    engine.run("one", tokens)
    assert engine.run("two", tokens).cached_tokens == 0


def test_a_longer_prompt_hits_what_it_shares(engine: Driver) -> None:
    tokens = prompt(12 * B)
    engine.run("short", tokens[: 6 * B])
    assert engine.run("long", tokens).cached_tokens == 6 * B
    other = [*tokens[: 3 * B], *prompt(5 * B)]
    assert engine.run("fork", other).cached_tokens == 3 * B


def test_generated_tokens_are_cached_with_the_prompt(engine: Driver) -> None:
    tokens = prompt(3 * B)
    request = engine.enqueue("r", tokens)
    engine.admit(request)
    engine.fill(request, 0)
    for token in range(2 * B + 1):
        engine.await_credit()
        assert engine.decode(request, token)
        engine.blocks.end_step()
    engine.settle()
    whole = engine.tokens[request]
    engine.release(request)
    assert engine.run("again", whole).cached_tokens == 5 * B


def test_dram_serves_after_the_hbm_is_gone(tmp_path: Path) -> None:
    with started(small_config(tmp_path)) as service:
        tokens = prompt(20 * B + 1)
        with attached(service.socket, "first") as engine:
            engine.run("cold", tokens)
            engine.settle()
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        with attached(service.socket, "second") as engine:
            warm = engine.run("warm", tokens)
            assert warm.cached_by_tier == {"dram": 20 * B}
            assert engine.run("again", tokens).cached_by_tier == {"hbm": 20 * B}
            engine.await_nothing_used()
            assert service.faults() == []


def test_two_sessions_share_one_device(service: Service) -> None:
    tokens = prompt(8 * B + 1)
    with attached(service.socket, "one") as one, attached(service.socket, "two") as two:
        one.run("cold", tokens)
        assert two.run("warm", tokens).cached_by_tier == {"hbm": 8 * B}
        request = one.enqueue("held", tokens)
        one.admit(request)
        two.run("more", prompt(8 * B))
        one.check(request, 8)
        one.release(request)
        one.await_nothing_used()
        two.await_nothing_used()


def test_a_session_uses_the_hbm_that_another_brings(tmp_path: Path) -> None:
    """A slot of an extent that came after the first set was taken for the last page of the pool."""
    with started(small_config(tmp_path)) as service, attached(service.socket, "small", pages=32) as small:
        with attached(service.socket, "large", pages=96) as large:
            request = large.enqueue("most", prompt(20 * B + 1))
            large.admit(request)
            large.fill(request, 0)
            assert small.run("larger than its own budget", prompt(40 * B + 1)).cached_tokens == 0
            assert small.session.hbm.num_pages == 96
            large.check(request, 20)
            large.release(request)
        small.await_nothing_used()
        assert service.faults() == []


def test_one_prompt_asked_64_times_is_computed_once(engine: Driver) -> None:
    """64 requests with one system prompt computed it 64 times."""
    tokens = prompt(6 * B + 1)
    requests = [engine.enqueue(f"r{i}", tokens) for i in range(64)]
    deadline = time.monotonic() + DEADLINE_S
    leader = None
    while leader is None:  # exactly one gets slots to fill
        leader = next((r for r in requests if engine.try_admit(r) is not None), None)
        assert time.monotonic() < deadline
        engine.blocks.wait(0.02)
    others = [r for r in requests if r != leader]
    for _ in range(5):
        assert all(engine.try_admit(r) is None for r in others)
        engine.blocks.wait(0.02)
    engine.fill(leader, 0)
    engine.blocks.end_step()
    admissions = [engine.admit(r) for r in others]
    assert {a.cached_tokens for a in admissions} == {6 * B}
    for request in requests:
        engine.release(request)
    engine.await_nothing_used()


def test_what_a_request_waits_for_that_never_comes_it_computes_itself(service: Service) -> None:
    """A request that died while it filled a shared prefix left all others waiting for ever."""
    tokens = prompt(5 * B + 1)
    with (
        attached(service.socket, "stuck") as stuck,
        attached(service.socket, "other", patience_s=0.3) as other,
    ):
        holder = stuck.enqueue("holder", tokens)
        stuck.admit(holder)  # and never fills
        began = time.monotonic()
        assert other.run("private", tokens).cached_tokens == 0
        assert time.monotonic() - began >= 0.25
        stuck.fill(holder, 0)
        stuck.blocks.end_step()
        stuck.settle()
        stuck.release(holder)
        assert stuck.run("warm", tokens).cached_tokens == 5 * B


class HeldCopier(TwinCopier):
    """A copier whose copies begin when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.submitted = 0
        self.began = threading.Event()

    def submit(self, batch: CopyBatch) -> bool:
        self.submitted += 1
        return super().submit(batch)

    def _copy(self, batch: CopyBatch, begin: int, end: int) -> None:
        self.began.set()
        assert self.go.wait(20)
        super()._copy(batch, begin, end)


@pytest.mark.parametrize("state", ["queued", "asked", "waiting", "loading", "admitted", "filled", "sealed"])
def test_an_abort_at_any_moment_leaks_nothing(tmp_path: Path, state: str) -> None:
    """Requests aborted while they waited, loaded or filled kept their slots for ever."""
    with started(small_config(tmp_path)) as service:
        tokens = prompt(6 * B + 1)
        copier = HeldCopier()
        if state == "loading":
            with attached(service.socket, "before") as engine:
                engine.run("cold", tokens)
                engine.settle()
            service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        with attached(service.socket, "aborts", copier=copier) as engine:
            if state == "waiting":
                holder = engine.enqueue("holder", tokens)
                engine.admit(holder)
            request = engine.enqueue("r", tokens)
            if state in ("asked", "waiting", "loading"):
                copier.go.clear()
                for _ in range(1 if state == "asked" else 20):
                    assert engine.try_admit(request) is None
                    engine.blocks.wait(0.01)
            elif state != "queued":
                engine.admit(request)
            if state in ("filled", "sealed"):
                engine.fill(request, 0)
            if state == "sealed":
                engine.blocks.end_step()
                engine.settle()
            engine.release(request)
            engine.blocks.release(request)  # twice does no harm
            copier.go.set()
            if state == "waiting":
                engine.release(holder)
            engine.await_nothing_used()
            assert engine.run("after", tokens).cached_tokens in (0, 6 * B)
            engine.await_nothing_used()
            assert service.faults() == []


def test_a_load_that_waits_behind_another_is_taken_back_by_an_abort(tmp_path: Path) -> None:
    """Blocks of aborted requests were still copied, in front of those that somebody waited for."""
    with started(small_config(tmp_path)) as service:
        first, second = prompt(6 * B + 1), [token + 1 for token in prompt(6 * B + 1)]
        with attached(service.socket, "before") as engine:
            engine.run("first", first)
            engine.run("second", second)
            engine.settle()
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        copier = HeldCopier()
        with attached(service.socket, "after", copier=copier) as engine:
            copier.go.clear()
            requests = []
            for name, tokens in (("a", first), ("b", second)):
                request = engine.enqueue(name, tokens)
                requests.append(request)
                expected = len(requests)
                wait_for(
                    name, lambda r=request, n=expected: engine.try_admit(r) is None and copier.submitted == n
                )
            engine.release(requests[1])
            copier.go.set()
            assert engine.admit(requests[0]).cached_tokens == 6 * B
            engine.release(requests[0])
            engine.await_nothing_used()
            assert copier.stats().loaded_blocks == 6, "the blocks of the aborted one were not copied"
            assert engine.run("again", second).cached_tokens == 6 * B
            engine.await_nothing_used()
            assert service.faults() == []


def test_a_page_that_is_being_loaded_is_not_given_away(tmp_path: Path) -> None:
    """The target of a load was freed by an abort and reused; the copy then wrote into the next request's block."""
    with started(small_config(tmp_path)) as service:
        tokens = prompt(6 * B + 1)
        with attached(service.socket, "before") as engine:
            engine.run("cold", tokens)
            engine.settle()
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        copier = HeldCopier()
        with attached(service.socket, "after", pages=32, copier=copier) as engine:
            copier.go.clear()
            request = engine.enqueue("r", tokens)
            wait_for("the load", lambda: engine.try_admit(request) is None and copier.began.is_set())
            engine.release(request)
            other = engine.enqueue("other", prompt(14 * B + 1))
            engine.admit(other)
            engine.fill(other, 0)
            copier.go.set()
            wait_for("the copy", lambda: copier.stats().loaded_blocks == 6)
            engine.check(other, 14)
            engine.release(other)


def test_a_full_pool_makes_requests_wait_and_serves_them_all(service: Service) -> None:
    """Two requests that each held half of the pages waited for each other for ever."""
    with attached(service.socket, "tight", device=0, pages=128) as engine:
        running: list[RequestId] = []
        waiting = [engine.enqueue(f"r{i}", prompt(40 * B + 1)) for i in range(8)]
        done = 0
        deadline = time.monotonic() + 30
        while done < 8:
            assert time.monotonic() < deadline, f"{done} of 8 done"
            for request in tuple(waiting):
                if engine.try_admit(request) is not None:
                    waiting.remove(request)
                    running.append(request)
                    engine.fill(request, 0)
            engine.blocks.end_step()
            if running:
                request = running.pop(0)
                engine.check(request, 40)
                engine.release(request)
                done += 1
            else:
                engine.blocks.wait(0.05)
        engine.settle()
        engine.await_nothing_used()


def test_a_prompt_as_large_as_the_pool_is_admitted(tmp_path: Path) -> None:
    """Slots kept in hand for decoding were those that the only waiting request lacked: nothing ever ran."""
    with started(small_config(tmp_path)) as service, attached(service.socket, "large", pages=32) as engine:
        assert engine.run("large", prompt(31 * B + 1)).cached_tokens == 0
        assert engine.run("small", prompt(B)).cached_tokens == 0


def test_an_answer_that_is_not_used_gives_its_pages_back(tmp_path: Path) -> None:
    """A small request had its pages and was not scheduled, the large one before it lacked those: nothing ran."""
    with started(small_config(tmp_path)) as service, attached(service.socket, "tight", pages=32) as engine:
        small = engine.enqueue("small", prompt(8 * B + 1))
        assert engine.try_admit(small) is None  # asked, and never asked for again
        large = engine.enqueue("large", prompt(29 * B + 1))
        engine.admit(large)
        engine.release(large)
        engine.admit(small)
        engine.release(small)
        engine.await_nothing_used()


def test_no_answer_is_awaited_in_a_decode_step(engine: Driver) -> None:
    """A step of decoding costs at most one message and waits for none."""
    request = engine.enqueue("r", prompt(2 * B))
    engine.admit(request)
    engine.fill(request, 0)
    engine.settle()
    waited: list[str] = []
    state = engine.session._state
    for name in ("wait", "wait_until"):
        setattr(state, name, lambda *_, name=name: waited.append(name))
    before = engine.session.sent_messages
    steps = 6 * B
    for token in range(steps):
        wait_for("a page in hand", lambda: engine.session.credit_in_hand)
        assert engine.decode(request, token)
        engine.blocks.end_step()
    for name in ("wait", "wait_until"):
        delattr(state, name)
    assert waited == []
    assert (
        engine.session.sent_messages - before <= 2 * steps
    )  # its own, and those of copies that ended meanwhile
    engine.release(request)


def test_a_stopped_daemon_stalls_no_decoding(own_service: Service) -> None:
    """A daemon stopped for two seconds stopped every engine with it."""
    with attached(own_service.socket, "decode", pages=512) as engine:
        request = engine.enqueue("r", prompt(2 * B))
        engine.admit(request)
        engine.fill(request, 0)
        engine.settle()
        wait_for("credit", lambda: engine.session.credit_in_hand >= 16)
        pid = own_service.daemon_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            end, steps = time.monotonic() + 2.0, list[tuple[float, float]]()
            with Stalls() as stalls:
                while time.monotonic() < end or len(steps) < 20:
                    began = time.monotonic()
                    assert engine.decode(request, len(steps))
                    engine.blocks.end_step()
                    steps.append((began, time.monotonic()))
                    time.sleep(0.04)
            slowest = max(ended - began - stalls.within(began, ended) for began, ended in steps)
            asked = engine.enqueue("new", prompt(3 * B))
            assert engine.try_admit(asked) is None
        finally:
            os.kill(pid, signal.SIGCONT)
        assert slowest < 0.9, "less than any time-out: nothing was waited for"
        engine.admit(asked)
        engine.fill(asked, 0)
        whole = engine.tokens[request]
        engine.blocks.end_step()
        engine.settle()
        engine.release(request)
        engine.release(asked)
        assert engine.run("again", whole).cached_tokens == (len(whole) - 1) // B * B
        engine.await_nothing_used()
        assert own_service.faults() == []


def test_a_killed_daemon_is_noticed_by_nobody(own_service: Service) -> None:
    """A daemon that restarted within milliseconds was not noticed: its clients went on with leases it did not know."""
    with attached(own_service.socket, "survivor") as engine:
        old = prompt(8 * B + 1)
        engine.run("cold", old)
        running = engine.enqueue("running", prompt(6 * B))
        engine.admit(running)
        engine.fill(running, 0, 3 * B)
        engine.await_credit(2)
        own_service.kill_daemon()
        engine.fill(running, 3 * B)
        engine.blocks.end_step()
        for token in range(B):
            assert engine.decode(running, token)
            engine.blocks.end_step()
        assert engine.run("warm", old).cached_by_tier == {"hbm": 8 * B}
        engine.settle()
        whole = engine.tokens[running]
        engine.check(running, len(whole) // B)
        engine.release(running)
        assert engine.run("again", whole).cached_tokens == 6 * B
        engine.await_nothing_used()
        assert own_service.faults() == []


def test_requests_that_wait_for_a_killed_daemon_are_admitted_by_the_next(own_service: Service) -> None:
    with attached(own_service.socket, "waits") as engine:
        requests = [engine.enqueue(f"r{i}", prompt(4 * B + 1)) for i in range(6)]
        for request in requests[:3]:
            engine.try_admit(request)
        pid = own_service.daemon_pid
        os.kill(pid, signal.SIGKILL)
        for request in requests:
            engine.try_admit(request)
        for request in requests:
            engine.admit(request, 20)
            engine.fill(request, 0)
            engine.blocks.end_step()
        engine.settle()
        for request in requests:
            engine.release(request)
        engine.await_nothing_used()
        assert own_service.faults() == []


def test_small_prompts_start_from_the_credit_while_the_daemon_is_away(own_service: Service) -> None:
    with attached(own_service.socket, "alone", pages=512) as engine:
        wait_for("credit", lambda: engine.session.credit_in_hand >= 16)
        pid = own_service.daemon_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            tokens = prompt(3 * B)
            request = engine.enqueue("r", tokens)
            assert engine.admit(request, 10).cached_tokens == 0
            engine.fill(request, 0)
            engine.blocks.end_step()
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.settle()
        engine.release(request)
        assert engine.run("warm", tokens).cached_tokens == 2 * B


def test_everything_killed_is_a_new_session_behind_the_same_pages(tmp_path: Path) -> None:
    """Keeper and daemon gone at once: the engine goes on by itself, and its old pages are given to nobody meanwhile."""
    config = small_config(tmp_path)
    with started(config) as first, attached(first.socket, "goes on") as engine:
        tokens = prompt(6 * B + 1)
        pages = engine.blocks.kv_pages()
        running = engine.enqueue("running", tokens)
        engine.admit(running)
        engine.fill(running, 0, 5 * B)
        daemon, keeper = first.daemon_pid, first.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        os.kill(daemon, signal.SIGKILL)
        with started(config) as second:
            wait_for("the loss", lambda: not engine.session.connected and _step(engine))
            time.sleep(1.0)
            engine.fill(running, 5 * B)  # it goes on in its own pages, and what it seals is lost
            engine.blocks.end_step()
            engine.check(running, 6)
            assert not engine.session.connected  # not before its pages are free
            engine.release(running)
            # Asked before the new session was there: its blocks are named by a key that was lost with the daemon.
            assert engine.run("cold", tokens).cached_tokens == 0
            assert engine.run("cold again", tokens).cached_tokens == 0
            assert engine.run("warm", tokens).cached_tokens == 6 * B
            assert engine.blocks.kv_pages() == pages
            engine.await_nothing_used()
            assert second.faults() == []


def _step(engine: Driver) -> bool:
    engine.blocks.end_step()
    return True


def test_a_killed_worker_leaves_its_blocks_to_the_next(own_service: Service) -> None:
    """kill -9 of a worker cost its whole cache: a new one started cold."""
    with connect(own_service.socket) as client:
        command = [
            sys.executable,
            "-m",
            "tests.support.worker",
            "--socket",
            own_service.socket,
            "--seed",
            "5",
        ]
        worker = subprocess.Popen([*command, "--name", "killed"], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert '"ready"' in worker.stdout.readline()
        wait_for("sealed blocks", lambda: own_service.tier("hbm").sealed_slots >= 64)
        worker.kill()
        worker.wait()
        worker.stdout.close()
        wait_for("the session's end", lambda: not client.stats().sessions)
        orphans = own_service.tier("hbm").orphan_slots
        assert orphans >= 64
        again = subprocess.run(
            [*command, "--name", "next", "--seconds", "2"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
        last = again.stdout.splitlines()[-1]
        assert '"wrong": 0' in last
        assert '"hit_blocks": 0' not in last
        assert own_service.faults() == []
