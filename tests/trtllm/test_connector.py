"""The connector under a host that calls in TensorRT-LLM's order: nothing wrong is ever read, whatever happens."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import ServeConfig
from kvstore.errors import ConfigError, KvstoreError
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.trtllm import interface

interface.install()

from engine_adapter.trtllm import OPTIONS_VARIABLE, KvstoreScheduler, KvstoreWorker  # noqa: E402 (behind `install`)
from tests.trtllm.host import BLOCK_TOKENS as B  # noqa: E402
from tests.trtllm.host import Host, Request, arguments  # noqa: E402

PATIENT = {"breaker_s": 10.0, "answer_patience_s": 10.0}
_FIRST = iter(range(1, 1 << 20))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with something that weights can be told by."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model.safetensors").write_bytes(b"weights")
    return str(folder)


@contextmanager
def host(
    socket: str, model: str, monkeypatch: pytest.MonkeyPatch, *, ready: bool = True, **options: Any
) -> Iterator[Host]:
    """`PATIENT` unless told otherwise: on a busy machine an answer took longer than 0.1 s, and a hit was a miss."""
    settings = {"socket": socket, **PATIENT, **options.pop("settings", {})}
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(settings))
    made = Host(arguments(model, **options.pop("args", {})), **options)
    try:
        if ready:
            await_store(made)
        yield made
    finally:
        made.close()


def await_store(made: Host) -> None:
    """The session begins once all ranks have met the leader, which the first step has them do."""
    half = made.scheduler._half

    def ready() -> bool:
        made.iterate()
        return half._link is not None and half._link.session is not None and bool(half._link._open)

    wait_for("the store", ready)


def prompt(tokens: int) -> list[int]:
    """A prompt that nobody else has."""
    return [next(_FIRST), *range(2000, 2000 + tokens - 1)]


def cached(made: Host, tokens: list[int], **options: Any) -> int:
    """Tokens that a request for this prompt loads."""
    return made.run(tokens, **options).matched


def await_cached(made: Host, tokens: list[int], count: int, **options: Any) -> None:
    wait_for(f"{count} tokens", lambda: cached(made, tokens, **options) == count)


def keep(made: Host, tokens: list[int], count: int) -> None:
    """Runs a prompt, and waits until its first `count` tokens are cached."""
    cached(made, tokens)
    made.settle()
    await_cached(made, tokens, count)


def await_end(made: Host, request: Request) -> None:
    wait_for(f"the end of {request.request_id}", lambda: made.iterate() or request.state == "done")


def await_nothing_held(made: Host) -> None:
    session = made.scheduler._half._link.session
    wait_for("nothing is used", lambda: made.iterate() or not session._state.dram.references.any(), 10.0)


# ------------------------------------------------------------ the interface itself


@pytest.mark.parametrize(
    "ours,methods", [(KvstoreScheduler, interface.SCHEDULER), (KvstoreWorker, interface.WORKER)]
)
def test_each_method_takes_what_it_is_given(ours: type, methods: dict[str, tuple[str, ...]]) -> None:
    assert not ours.__abstractmethods__  # type: ignore[attr-defined]
    for name, parameters in methods.items():
        assert tuple(inspect.signature(getattr(ours, name)).parameters) == ("self", *parameters), name


def test_wrong_options_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    for text in ("[]", "{", '{"sock": 1}', '{"load_patience_s": 1}'):
        monkeypatch.setenv(OPTIONS_VARIABLE, text)
        with pytest.raises(ConfigError):
            KvstoreScheduler(arguments(model))
        with pytest.raises(ConfigError):
            KvstoreWorker(arguments(model))


# ------------------------------------------------------------ hits


@pytest.mark.parametrize("world", [1, 2])
def test_what_one_engine_computes_another_loads(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    tokens = prompt(6 * B + 2)
    with host(service.socket, model, monkeypatch, world=world) as one:
        assert cached(one, tokens) == 0
        one.settle()
        await_cached(one, tokens, 6 * B)
        assert cached(one, tokens[: 3 * B] + prompt(B)) == 3 * B
        await_nothing_held(one)
    with host(service.socket, model, monkeypatch, world=world) as two:
        assert cached(two, tokens) == 6 * B
        await_nothing_held(two)
    assert service.faults() == []


@pytest.mark.parametrize("use,served,stored", [("read", True, False), ("dry-run", False, True)])
def test_an_engine_uses_of_the_cache_what_it_says(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, use: str, served: bool, stored: bool
) -> None:
    known, new = prompt(6 * B + 2), prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as one:
        keep(one, known, 6 * B)
        before = service.stats().counters
        with host(service.socket, model, monkeypatch, settings={"cache": use}) as other:
            assert cached(other, known) == (6 * B if served else 0)
            assert cached(other, new) == 0
            other.settle()
            await_nothing_held(other)
        after = service.stats().counters
        for name, blocks in (("blocks_dry_run", 6 + 4), ("blocks_would_hit_dram", 6)):
            assert after.get(name, 0) - before.get(name, 0) == (0 if served else blocks)
        if stored:
            await_cached(one, new, 4 * B)
        else:
            assert cached(one, new) == 0


@pytest.mark.parametrize("tokens,most", [(3 * B, 2 * B), (3 * B + 1, 3 * B), (B - 1, 0), (B, 0)])
def test_one_token_is_always_computed(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, tokens: int, most: int
) -> None:
    """A prompt of exactly k blocks that was loaded to its last token had nothing to compute."""
    asked = prompt(tokens)
    with host(service.socket, model, monkeypatch) as made:
        cached(made, asked, new_tokens=B + 1)
        made.settle()
        await_cached(made, asked, most)


def test_generated_tokens_are_kept_with_the_prompt(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(service.socket, model, monkeypatch) as made:
        request = made.run(prompt(2 * B), new_tokens=2 * B + 1)
        made.settle()
        await_cached(made, request.tokens, 4 * B)


def test_a_prompt_in_chunks_is_kept_as_it_is_computed(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's blocks were stored before the chunk was computed."""
    tokens = prompt(10 * B + 1)
    with host(service.socket, model, monkeypatch, chunk_tokens=3) as made:
        assert cached(made, tokens) == 0
        made.settle()
        await_cached(made, tokens, 10 * B)


def test_a_prefix_that_ends_within_a_block_is_left_to_the_engine(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 4 * B)
        asked = Request(1 << 40, tokens)
        assert made.scheduler.get_num_new_matched_tokens(asked, B + 1) == (0, False)
        assert made.scheduler.get_num_new_matched_tokens(asked, 2 * B) == (2 * B, True)
        assert made.scheduler.get_num_new_matched_tokens(asked, 4 * B) == (0, False)
        made.scheduler.cancel_load(asked, 2 * B, 4 * B)
        assert not made.scheduler.request_finished(asked, [])
        await_nothing_held(made)


# ------------------------------------------------------------ what must not meet


def test_salts_adapters_and_images_keep_apart(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's KV depends on each of them, so a wrong hit would be seen byte for byte."""
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        for options in ({"lora_task_id": 1}, {"multimodal_hashes": [[1]]}):
            for _ in range(3):
                assert cached(made, tokens, **options) == 0
                made.settle()
        keep(made, tokens, 4 * B)
        for salt in ("a", "b"):
            wait_for("its namespace", lambda salt=salt: cached(made, prompt(2 * B), cache_salt=salt) == 0)
        assert cached(made, tokens, cache_salt="a") == 0
        made.settle()
        await_cached(made, tokens, 4 * B, cache_salt="a")
        assert cached(made, tokens, cache_salt="b") == 0
        assert cached(made, tokens, lora_task_id=1) == 0


@pytest.mark.parametrize(
    "change", [{"attn_backend": "FLASHINFER"}, {"dtype": "float16"}, {"quant_config": "fp8"}]
)
def test_other_arguments_find_nothing(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    tokens = prompt(3 * B + 1)
    with (
        host(service.socket, model, monkeypatch) as one,
        host(service.socket, model, monkeypatch, args=change) as other,
    ):
        cached(one, tokens)
        one.settle()
        await_cached(one, tokens, 3 * B)
        assert cached(other, tokens) == 0


@pytest.mark.parametrize(
    "change", [{"speculative_config": "eagle"}, {"enable_attention_dp": True}, {"model": "nowhere/model"}]
)
def test_what_cannot_be_told_apart_is_served_without_the_store(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    tokens = prompt(3 * B + 1)
    with host(service.socket, model, monkeypatch, ready=False, args=change) as made:
        for _ in range(3):
            assert cached(made, tokens) == 0
            made.settle()


def test_the_second_cache_manager_is_refused_and_serves(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with host(service.socket, model, monkeypatch, ready=False) as made:
        made.workers[0].register_kv_cache_layout(object())
        assert cached(made, prompt(2 * B)) == 0
        wait_for("the reason", lambda: "KVCacheManagerV2" in caplog.text)


# ------------------------------------------------------------ requests that end early


def test_a_request_that_ends_while_it_loads_keeps_its_pages(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages were given to another request and then overwritten by its load."""
    tokens = prompt(8 * B + 1)
    with host(service.socket, model, monkeypatch, blocks=12) as made:
        keep(made, tokens, 8 * B)
        for _ in range(20):
            request = made.add(tokens)
            made._allocate()
            assert request.request_id in made.loading
            metadata = made.scheduler.build_connector_meta(interface.SchedulerOutput())
            made.workers[0].bind_connector_meta(metadata)
            made.workers[0].start_load_kv(None)
            made.abort(request)
            other = made.run(prompt(8 * B + 1))
            assert other.state == "done"
            made.settle()
            await_end(made, request)
        await_nothing_held(made)


def test_a_promise_that_is_not_used_is_let_go(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 4 * B)
        for number in range(20):
            asked = Request((1 << 41) + number, tokens)
            assert made.scheduler.get_num_new_matched_tokens(asked, 0) == (4 * B, True)
            assert not made.scheduler.request_finished(asked, [])
        await_nothing_held(made)


def test_what_was_promised_is_loaded_though_it_is_cleared_meanwhile(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine cannot be told that a block vanished between lookup and load, so it must not."""
    tokens = prompt(6 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 6 * B)
        request = made.add(tokens)
        made._allocate()
        assert request.matched == 6 * B
        service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
        await_end(made, request)
        await_nothing_held(made)


def test_pages_too_few_for_a_promise_are_an_error_not_a_wrong_block(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 4 * B)
        asked = Request(1 << 42, tokens)
        for pages in ([1, 2], [1, -1, 2, 3, 4]):
            made.scheduler.get_num_new_matched_tokens(asked, 0)
            with pytest.raises(KvstoreError, match="not supported"):
                made.scheduler.update_state_after_alloc(asked, pages)
        made.scheduler.request_reset(asked)
        await_nothing_held(made)


def test_a_load_that_fails_is_an_error_not_a_wrong_block(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 4 * B)
        member = made.workers[0]._half._member
        monkeypatch.setattr(type(member), "sealed", lambda self, slots, generations: slots < 0)
        with pytest.raises(KvstoreError, match="was promised and could not be loaded"):
            made.run(tokens)
        monkeypatch.undo()


# ------------------------------------------------------------ everything at once, and what dies


def test_a_load_that_fails_beside_a_running_request_is_an_error_too(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that was noticed where a step's stores begin was forgotten, and the pages were taken as loaded."""
    tokens = prompt(4 * B + 1)
    with host(service.socket, model, monkeypatch) as made:
        keep(made, tokens, 4 * B)
        made.add(prompt(B), new_tokens=60)
        half = made.workers[0]._half
        monkeypatch.setattr(type(half._member), "sealed", lambda self, slots, generations: slots < 0)
        made.iterate()
        request = made.add(tokens)
        made._allocate()
        half.bind(made.scheduler.build_connector_meta(interface.SchedulerOutput()))
        half.begin_loads(None)
        wait_for("its end", lambda: all(running.ended for running in half._working._loads.values()))
        half.begin_stores(None)
        with pytest.raises(KvstoreError, match=f"requests {request.request_id} was promised"):
            made.iterate()
        monkeypatch.undo()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.engine)])
def test_a_crowd_in_a_small_pool_reads_nothing_wrong(
    service: Service, model: str, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """Shared prefixes, chunks, aborts and preemptions; every page that is read is compared."""
    draw = random.Random(world)
    roots = [prompt(draw.randrange(1, 30)) for _ in range(6)]
    with host(service.socket, model, monkeypatch, world=world, blocks=40, chunk_tokens=7) as made:
        live: list[Request] = []
        matched = 0
        for _ in range(200):
            live = [request for request in live if request.state not in ("done", "ended")]
            if len(live) < 6:
                root = draw.choice(roots)
                tokens = root[: draw.randrange(1, len(root) + 1)] + prompt(draw.randrange(1, 12))
                live.append(made.add(tokens, new_tokens=draw.randrange(1, 9)))
                if draw.random() < 0.3:
                    roots[draw.randrange(len(roots))] = tokens
            event = draw.random()
            victim = draw.choice(live)
            if event < 0.05 and victim.state in ("new", "running"):
                made.abort(victim)
            elif event < 0.1 and victim in made.running and victim.request_id not in made.loading:
                made.preempt(victim)
            made.iterate()
            matched += sum(request.matched for request in live if request.state == "done")
        for request in live:
            if request.state != "done":
                await_end(made, request)
        made.settle()
        assert len(made.free) == 40
        assert matched > 0
        await_nothing_held(made)
    assert service.faults() == []


@pytest.mark.engine
def test_the_engine_serves_without_a_daemon_and_picks_it_up(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: ServeConfig = small_config(tmp_path, nvme_bytes=64 << 20)
    tokens = prompt(6 * B + 1)
    hasty = {"breaker_s": 0.3, "answer_patience_s": 0.1}
    with host(config.socket, model, monkeypatch, ready=False, settings=hasty) as made:
        began = time.monotonic()
        assert cached(made, tokens) == 0
        assert time.monotonic() - began < 2.0
        with started(config) as service:
            await_store(made)
            keep(made, tokens, 6 * B)
            pid = service.daemon_pid
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            for _ in range(3):
                assert cached(made, tokens) in (0, 6 * B)
            assert time.monotonic() - began < 3.0  # a daemon that is stopped holds nobody up
            os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                assert cached(made, tokens) in (0, 6 * B)
            service.await_restart(pid)
            await_cached(made, tokens, 6 * B)
            service.call("Flush", pb.FlushRequest(deadline_ms=20_000), timeout_s=30.0)
            for pid in (service.keeper_pid, service.daemon_pid):
                os.kill(pid, signal.SIGKILL)
        assert cached(made, tokens) in (0, 6 * B)
        with started(config) as service:
            await_cached(made, tokens, 6 * B)  # from disk: the first lookups have it brought up
            await_nothing_held(made)
            assert service.faults() == []


@pytest.mark.engine
def test_a_lookup_waits_for_a_disk_where_it_is_told_to(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, nvme_bytes=64 << 20)
    tokens = prompt(6 * B + 1)
    with started(config) as service, host(config.socket, model, monkeypatch) as made:
        keep(made, tokens, 6 * B)
        service.call("Flush", pb.FlushRequest(deadline_ms=20_000), timeout_s=30.0)
    with (
        started(config),
        host(config.socket, model, monkeypatch, settings={"lookup_patience_s": 5.0}) as made,
    ):
        half = made.scheduler._half
        wait_for("its index", lambda: half._link.session.tables.tables.columns.nvme.min() == 0)
        assert cached(made, tokens) == 6 * B
