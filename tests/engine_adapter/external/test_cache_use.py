"""Engines with HBM of their own that use the cache in part: what they hit, what they leave, and what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.cache_use import CacheUse
from kvstore.cli.pause import pause
from kvstore.cli.resume import resume
from tests.engine_adapter.external.host_engine import BLOCK, HostEngine
from tests.engine_adapter.external.test_scheduling import sound, tokens
from tests.support.daemon import Service

Engines = Callable[..., HostEngine]
BLOCKS = 6


def prompt(seed: int) -> list[int]:
    """Of six full blocks and a token."""
    return tokens(1000 + seed, BLOCKS * BLOCK + 1)


def copied(engine: HostEngine) -> tuple[int, int]:
    """Pieces that the ranks have (loaded, stored)."""
    found = [rank.copier.stats() for rank in engine.ranks]
    return sum(one.loaded_blocks for one in found), sum(one.stored_blocks for one in found)


@pytest.mark.parametrize(
    "use, served, stored",
    [
        (CacheUse.READ, True, False),
        (CacheUse.WRITE, False, True),
        (CacheUse.OFF, False, False),
        (CacheUse.DRY_RUN, False, True),
    ],
)
def test_scheduler_and_ranks_do_with_the_cache_what_the_engine_says(
    service: Service, engine: Engines, use: CacheUse, served: bool, stored: bool
) -> None:
    plain, other = engine(ranks=2), engine(ranks=2, use=use)
    known, new = prompt(list(CacheUse).index(use)), prompt(10 + list(CacheUse).index(use))
    plain.ask("known", known)
    session = other.link.attached
    assert session is not None
    sent = session.sent_messages
    assert other.ask("known", known) == (BLOCKS * BLOCK if served else 0)
    assert copied(other)[1] == 0  # what is there is not stored again, whoever may read it
    assert other.ask("new", new) == 0
    loads, stores = copied(other)
    assert (loads > 0, stores > 0) == (served, stored)
    if use is CacheUse.OFF:
        assert session.sent_messages == sent + 4  # of `drain`, which asks twice, once a request
    assert plain.ask("new", new) == (BLOCKS * BLOCK if stored else 0)
    sound(service, plain, other)


def test_a_dry_run_counts_each_request_once(service: Service, engine: Engines) -> None:
    plain, dry = engine(), engine(use=CacheUse.DRY_RUN)
    known = prompt(20)
    plain.ask("known", known)
    before = service.stats().counters
    assert dry.ask("longer", known + prompt(21)) == 0
    after = service.stats().counters
    counted = {
        name: after.get(name, 0) - before.get(name, 0) for name in ("blocks_dry_run", "blocks_would_hit_dram")
    }
    asked = (2 * (BLOCKS * BLOCK + 1) - 1) // BLOCK
    assert counted == {"blocks_dry_run": asked, "blocks_would_hit_dram": BLOCKS}
    sound(service, plain, dry)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_paused_service_promises_nothing(service: Service, engine: Engines, policy: str) -> None:
    """A pause showed in acquires alone: a lookup promised what was not given, and under `fail` the request ended."""
    one = engine(policy=policy)
    known = prompt(30 + len(policy))
    one.ask("cold", known)
    one.forget()
    pause(socket=service.socket)
    try:
        assert one.ask("paused", known) == 0
        assert one.scheduling.stats().given_up_blocks == 0
        one.forget()
        assert one.ask("new", prompt(40 + len(policy))) == 0
    finally:
        resume(socket=service.socket)
    assert one.failed == []
    one.forget()
    assert one.ask("resumed", known) == BLOCKS * BLOCK
    one.forget()
    assert one.ask("was not stored", prompt(40 + len(policy))) == 0
    sound(service, one)


def test_tenants_share_no_block(service: Service, engine: Engines) -> None:
    alice, bob, nobody = engine(tenant="alice"), engine(tenant="bob"), engine()
    known = prompt(50)
    alice.ask("cold", known)
    assert bob.ask("another", known) == nobody.ask("none", known) == 0
    alice.forget()
    assert alice.ask("again", known) == BLOCKS * BLOCK
    sound(service, alice, bob, nobody)
