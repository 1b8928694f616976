"""The scheduling half with a real service, an engine that calls in vLLM's order, and any number of ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from engine_adapter.base import Ending
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.engine_adapter.external.host_engine import BLOCK, HostEngine
from tests.support.daemon import DEADLINE_S, Service, wait_for

Engines = Callable[..., HostEngine]


def tokens(seed: int, count: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(50_000) for _ in range(count)]


def clear(service: Service) -> pb.ClearReply:
    """What nobody holds is a miss from now on."""
    reply = service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
    assert isinstance(reply, pb.ClearReply)
    return reply


def sound(service: Service, *engines: HostEngine) -> None:
    """Nothing wrong was read, nothing leaks, and the store is sound."""
    for one in engines:
        one.drain()
        assert one.bad == []
        assert one.scheduling.stats().requests == len(one.requests)
    assert service.faults() == []
    sessions = [one.link.attached for one in engines if one.link.attached is not None]
    wait_for(
        "nothing to be held but the slots in hand",
        lambda: service.tier("dram").held_slots <= sum(session.room_in_hand for session in sessions),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stored_prompt_is_loaded_by_the_same_engine_and_by_another(
    service: Service, engine: Engines, ranks: int
) -> None:
    first, second = engine(ranks=ranks), engine(ranks=ranks)
    prompt = tokens(ranks, 9 * BLOCK + 2)
    assert first.ask("cold", prompt) == 0
    assert first.ask("own", prompt) == 9 * BLOCK
    assert first.scheduling.stats().loaded_blocks == 0
    first.forget()
    assert first.ask("stored", prompt) == 9 * BLOCK
    assert second.ask("other", prompt) == 9 * BLOCK
    assert second.scheduling.stats().loaded_blocks == 9
    assert second.ask("longer", [*prompt[: 4 * BLOCK], *tokens(99, BLOCK)]) == 4 * BLOCK
    sound(service, first, second)


@pytest.mark.parametrize("count, cached", [(3 * BLOCK, 2), (3 * BLOCK + 1, 3), (BLOCK - 1, 0), (BLOCK, 0)])
def test_one_token_is_always_left_to_compute(
    service: Service, engine: Engines, count: int, cached: int
) -> None:
    one = engine()
    one.ask("cold", tokens(count, count))
    one.forget()
    assert one.ask("warm", tokens(count, count)) == cached * BLOCK
    sound(service, one)


def test_a_lookup_has_no_effect(service: Service, engine: Engines) -> None:
    one = engine()
    prompt = tokens(21, 4 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    one.add("asked", prompt)
    session = one.link.attached
    assert session is not None
    assert session.drain(DEADLINE_S)
    held, sent = service.tier("dram").held_slots, session.sent_messages
    found = {one.scheduling.matched("asked", len(prompt), 0) for _ in range(100)}
    assert found == {4 * BLOCK}
    assert (service.tier("dram").held_slots, session.sent_messages) == (held, sent)
    one.abort("asked")
    sound(service, one)


def test_a_request_that_waits_is_not_looked_up_at_every_step(service: Service, engine: Engines) -> None:
    """Hundreds of requests that waited for a disk were each looked up at each step."""
    one = engine(lookup_s=0.2)
    one.add("waits", tokens(22, 4 * BLOCK + 1))
    request = one.scheduling._requests["waits"]
    request.chain, asked = None, []
    plain = one.link.namespace
    one.link.namespace = asked.append  # type: ignore[method-assign,assignment]
    began = time.monotonic()
    while one.scheduling.matched("waits", 4 * BLOCK + 1, 0) is None:
        assert time.monotonic() < began + DEADLINE_S
    assert time.monotonic() >= began + 0.15
    assert 2 <= len(asked) <= 60
    one.link.namespace = plain  # type: ignore[method-assign]
    one.abort("waits")
    sound(service, one)


def test_a_step_with_nothing_to_do_sends_nothing_and_is_quick(service: Service, engine: Engines) -> None:
    one = engine(num_pages=256)
    for number in range(32):
        one.add(f"busy {number}", tokens(100 + number, 2 * BLOCK + 1), generate=100)
    one.run(lambda: all(request.state == "running" for request in one.requests.values()))
    one.run(lambda: not one.scheduling.busy)
    session = one.link.attached
    assert session is not None
    assert session.drain(DEADLINE_S)
    sent = session.sent_messages
    computed = [(name, len(request.tokens) // BLOCK * BLOCK) for name, request in one.requests.items()]
    spent = []
    for _ in range(200):
        began = time.perf_counter()
        plan = one.scheduling.plan(computed, (), lambda _: None)
        spent.append(time.perf_counter() - began)
        assert plan.empty
    assert session.sent_messages == sent
    assert sorted(spent)[100] < 1e-3
    for name in list(one.requests):
        one.abort(name)
    sound(service, one)


def test_blocks_that_vanish_between_lookup_and_load_are_computed(service: Service, engine: Engines) -> None:
    one, cleared = engine(), []
    prompt = tokens(31, 6 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    plain = one.scheduling.allocated

    def allocated(*arguments: object) -> None:
        cleared.append(clear(service))
        plain(*arguments)  # type: ignore[arg-type]

    one.scheduling.allocated = allocated  # type: ignore[method-assign]
    assert one.ask("gone", prompt) == 0
    assert [reply.kept_blocks for reply in cleared] == [0]
    one.scheduling.allocated = plain  # type: ignore[method-assign]
    assert one.scheduling.stats().given_up_blocks == 6
    one.forget()
    assert one.ask("again", prompt) == 6 * BLOCK
    sound(service, one)


def test_a_load_that_is_not_believed_keeps_what_came_before_it(service: Service, engine: Engines) -> None:
    one = engine()
    prompt = tokens(41, 6 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    memory = one.ranks[0].member
    plain = memory.sealed

    def sealed(slots: object, generations_: object) -> object:
        good = plain(slots, generations_).copy()  # type: ignore[arg-type]
        good[4:] = False
        return good

    memory.sealed = sealed  # type: ignore[method-assign,assignment]
    assert one.ask("failed", prompt) == 4 * BLOCK
    memory.sealed = plain  # type: ignore[method-assign]
    sound(service, one)


def test_under_fail_that_request_alone_ends(service: Service, engine: Engines) -> None:
    one = engine(policy="fail")
    prompt = tokens(51, 3 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    one.ranks[0].member.sealed = lambda slots, _: slots < 0  # type: ignore[method-assign,assignment]
    assert one.ask("failed", prompt) == -1
    assert one.ask("other", tokens(52, BLOCK)) == 0
    sound(service, one)


def test_an_abort_at_any_moment_leaks_nothing(service: Service, engine: Engines) -> None:
    one = engine(ranks=2)
    prompt = tokens(61, 5 * BLOCK + 1)
    one.ask("cold", prompt)
    for steps in range(6):
        one.forget()
        free = one.free_pages
        one.add(f"aborted {steps}", prompt, generate=8)
        for _ in range(steps):
            one.step()
        if f"aborted {steps}" in one.requests:
            one.abort(f"aborted {steps}")
        one.drain()
        one.forget()
        assert one.free_pages == free
    sound(service, one)


def slow_copies(one: HostEngine) -> None:
    """Each batch begins 50 ms late: by then the next step has long computed."""
    for rank in one.ranks:
        copier = rank.mover._copier
        plain = copier._copy

        def copy(*arguments: object, plain: Callable[..., None] = plain) -> None:
            time.sleep(0.05)
            plain(*arguments)

        copier._copy = copy  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["preempted", "finished"])
def test_pages_that_are_still_being_stored_are_not_overwritten(
    service: Service, engine: Engines, how: str
) -> None:
    """A block under one prompt's name had another prompt's bytes: its page was used again before it was copied."""
    one, other = engine(num_pages=7), engine()
    prompt, next_prompt = (tokens(seed + len(how), 4 * BLOCK + 1) for seed in (700, 800))
    slow_copies(one)
    one.add("first", prompt, generate=0 if how == "finished" else 8)
    one.run(lambda: "first" in one.finished or one.requests["first"].computed > 0)
    if how == "preempted":
        one.preempt("first")
        del one.requests["first"]  # and it does not come back before the other one
    one.forget()
    one.add("second", next_prompt, generate=0)
    one.run(lambda: "second" in one.finished)
    one.drain()
    if how == "preempted":
        one.scheduling.ended("first", (), 0)
    assert other.ask("first again", prompt) in (0, 4 * BLOCK)
    assert other.ask("second again", next_prompt) == 4 * BLOCK
    sound(service, one, other)


def test_salts_and_adapters_are_apart_even_by_the_same_name(service: Service, engine: Engines) -> None:
    one = engine()
    prompt = tokens(81, 3 * BLOCK + 1)
    assert one.ask("plain", prompt) == 0
    assert one.ask("salted", prompt, salt="x") == 0
    assert one.ask("adapted", prompt, adapter=("x", "")) == 0
    one.forget()
    assert one.ask("plain again", prompt) == 3 * BLOCK
    one.forget()
    assert one.ask("salted again", prompt, salt="x") == 3 * BLOCK
    one.forget()
    assert one.ask("another salt", prompt, salt="y") == 0
    sound(service, one)


def test_a_salt_that_cannot_be_named_is_not_cached_and_others_are(service: Service, engine: Engines) -> None:
    """A salt that is no Unicode ended the link's thread, and with it the cache of all requests for good."""
    one = engine()
    prompt = tokens(85, 3 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    assert one.ask("odd salt", prompt, salt="\ud800") == 0
    one.forget()
    assert one.ask("odd again", prompt, salt="\ud800") == 0
    assert one.ask("warm", prompt) == 3 * BLOCK
    assert one.ask("another salt", prompt, salt="z") == 0
    one.forget()
    assert one.ask("warm by its salt", prompt, salt="z") == 3 * BLOCK
    sound(service, one)


def test_after_a_reset_nothing_from_before_is_read_or_stored(service: Service, engine: Engines) -> None:
    one, other = engine(), engine()
    prompt, during = tokens(91, 3 * BLOCK + 1), tokens(92, 3 * BLOCK + 1)
    one.ask("before", prompt)
    one.add("under way", during, generate=2 * BLOCK)
    one.run(lambda: one.requests["under way"].state == "running")
    one.drain()
    stored = one.scheduling.stats().stored_blocks
    one.scheduling.reset()
    one.run(lambda: "under way" in one.finished)
    one.drain()
    assert one.scheduling.stats().stored_blocks == stored
    one.forget()
    assert one.ask("after", prompt) == 0
    one.forget()
    assert one.ask("after that", prompt) == 3 * BLOCK
    assert other.ask("with the old weights", prompt) == 3 * BLOCK
    sound(service, one, other)


def test_a_load_that_waits_when_all_is_reset_does_not_come(service: Service, engine: Engines) -> None:
    """What the old weights gave was loaded still; and one that was to be asked for again ended the engine."""
    one = engine()
    prompts = [tokens(93, 3 * BLOCK + 1), tokens(94, 3 * BLOCK + 1)]
    for number, prompt in enumerate(prompts):
        one.ask(f"before {number}", prompt)
    one.forget()
    pid = service.daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for number, prompt in enumerate(prompts):
            one.add(str(number), prompt)
        one.step()
        again = one.scheduling._requests["1"].load
        assert again is not None
        assert again.grant is not None
        again.grant.abandon()
        again.grant = None
        one.scheduling.reset()
    finally:
        os.kill(pid, signal.SIGCONT)
    one.run(lambda: {"0", "1"} <= set(one.finished))
    assert [one.finished[name].cached for name in ("0", "1")] == [0, 0]
    assert one.scheduling.stats().given_up_blocks == 6
    sound(service, one)


def test_only_confirmed_tokens_are_hashed(service: Service, engine: Engines) -> None:
    """An engine that schedules asynchronously counts tokens as computed before it knows them."""
    one, other = engine(ahead=2 * BLOCK), engine()
    prompt = tokens(101, 3 * BLOCK + 1)
    one.add("grows", prompt, generate=2 * BLOCK)
    one.run(lambda: "grows" in one.finished)
    one.drain()
    grown = [*one.finished["grows"].tokens]
    assert one.scheduling.stats().stored_blocks == len(grown) // BLOCK
    assert other.ask("again", [*grown, 1]) == len(grown) // BLOCK * BLOCK
    sound(service, one, other)


def test_no_room_is_no_error_and_no_hole(service: Service, engine: Engines) -> None:
    """A prompt of more blocks than there are slots in hand is stored over several steps, from its first block on."""
    one = engine(room=2, num_pages=64)
    prompt = tokens(111, 12 * BLOCK + 1)
    session, working = one.link.attached, one.ranks[0].working
    assert session is not None

    def stepped() -> bool:
        """What was begun has been copied, and slots that were asked for have come."""
        wait_for("copies", lambda: all(running.ended for running in list(working._running.values())))
        wait_for("slots", lambda: one.scheduling.busy or session.room_in_hand > 0)
        return "cold" in one.finished

    one.add("cold", prompt, generate=3 * BLOCK)
    one.run(stepped)
    one.drain()
    stored = one.scheduling.stats().stored_blocks
    assert stored > 2
    one.forget()
    assert one.ask("warm", prompt) == min(12, stored) * BLOCK
    sound(service, one)


def test_the_daemon_dies_and_comes_back(service: Service, engine: Engines) -> None:
    one = engine()
    prompt = tokens(121, 4 * BLOCK + 1)
    one.ask("cold", prompt)
    one.add("through it", tokens(122, 3 * BLOCK + 1), generate=40)
    one.run(lambda: one.requests["through it"].state == "running")
    service.kill_daemon()
    one.run(lambda: "through it" in one.finished)
    one.attached()
    one.forget()
    assert one.ask("warm", prompt) == 4 * BLOCK
    sound(service, one)


def test_what_was_asked_while_the_daemon_was_away_is_a_hit_when_it_is_back(
    service: Service, engine: Engines
) -> None:
    """vLLM's first prompt after the daemon's kill -9 was computed: a load was given up as soon as the breaker opened,
    and lookups until the stream was open again were misses."""
    one = engine(breaker_s=0.5)
    looked_up, loading = tokens(131, 4 * BLOCK + 1), tokens(132, 4 * BLOCK + 1)
    one.ask("first", looked_up)
    one.ask("second", loading)
    one.forget()
    one.add("loading", loading)
    plain = one.scheduling.allocated

    def allocated(*arguments: object) -> None:
        if arguments[2]:  # the acquire of a load: it finds nobody
            pids.append(service.daemon_pid)
            os.kill(pids[0], signal.SIGKILL)
            wait_for(
                "a lost stream", lambda: one.link.attached is not None and not one.link.attached.connected
            )
        plain(*arguments)  # type: ignore[arg-type]

    pids: list[int] = []
    one.scheduling.allocated = allocated  # type: ignore[method-assign]
    one.run(lambda: bool(pids))
    one.scheduling.allocated = plain  # type: ignore[method-assign]
    one.add("looked up", looked_up)
    assert one.scheduling.matched("looked up", len(looked_up), 0) is None
    assert one.scheduling.matched("short", BLOCK, 0) == 0
    one.run(lambda: {"loading", "looked up"} <= set(one.finished))
    service.await_restart(pids[0])
    assert [one.finished[name].cached for name in ("loading", "looked up")] == [4 * BLOCK, 4 * BLOCK]
    assert one.scheduling.stats().given_up_blocks == 0
    sound(service, one)


def test_nobody_waits_for_long_for_a_daemon_that_does_not_answer(service: Service, engine: Engines) -> None:
    one, other = engine(lookup_s=0.3, breaker_s=0.5, return_s=0.8), engine()
    prompt = tokens(141, 4 * BLOCK + 1)
    one.ask("cold", prompt)
    one.forget()
    pid = service.daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        one.add("its load waits", prompt)
        one.run(lambda: "its load waits" in one.finished)
        assert one.finished["its load waits"].cached == 0
        assert 0.5 < time.monotonic() - began < DEADLINE_S / 2
        one.forget()
        one.add("nothing waits", prompt)
        assert one.scheduling.matched("nothing waits", len(prompt), 0) == 0
        one.abort("nothing waits")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for("an answer", lambda: one.link.session is not None)
    assert other.ask("warm", prompt) == 4 * BLOCK
    sound(service, one, other)


def test_a_prompt_that_waits_for_a_tool_is_retained_until_its_turn_ends(
    service: Service, engine: Engines
) -> None:
    """No engine said how its answers ended."""
    one, prompt = engine(), tokens(151, 4 * BLOCK + 1)
    one.ask("cold", prompt)
    before = service.stats().counters["retained"]
    one.ending = Ending.TOOL_USE
    one.ask("calls", prompt)
    wait_for("the hint", lambda: service.stats().counters["retained"] == before + 4)
    one.ending = Ending.END_TURN
    one.ask("ends", prompt)
    one.drain()
    assert service.stats().counters["retained"] == before + 4
    sound(service, one)
