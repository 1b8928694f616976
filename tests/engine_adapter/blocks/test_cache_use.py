"""An engine that uses the cache in part, over a real service: what it hits, and what it leaves for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.copying.copier import TwinCopier
from kvstore.cache_use import CacheUse
from kvstore.cli.pause import pause
from kvstore.cli.resume import resume
from kvstore.client import DeviceSpec, connect
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import Driver
from tests.support.worker import BLOCK_TOKENS, PARTS, geometry

BLOCKS = 6
CACHED = BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("kv")
    with started(small_config(folder, nvme_bytes=128 * MIB)) as service:
        yield service


def prompt(number: int) -> list[int]:
    """Of six full blocks and a token."""
    return [1000 * number + token for token in range(CACHED + 1)]


def run(service: Service, tokens: list[int], use: CacheUse = CacheUse.ON) -> int:
    """Tokens of a prompt that a new engine finds cached; what it computed is stored as far as it may be."""
    device = DeviceSpec(hbm_bytes=64 * geometry().slot_bytes)
    with (
        connect(service.socket, timeout_s=30.0) as client,
        client.attach("engine", geometry(), device, use=use) as session,
    ):
        copier = TwinCopier()
        try:
            engine = Driver(client, session, copier, parts=PARTS)
            admission = engine.run("r", tokens)
            engine.settle()
            return admission.cached_tokens
        finally:
            copier.close(10.0)


@pytest.mark.parametrize(
    "use, served, stored",
    [
        (CacheUse.ON, True, True),
        (CacheUse.READ, True, False),
        (CacheUse.WRITE, False, True),
        (CacheUse.OFF, False, False),
        (CacheUse.DRY_RUN, False, True),
    ],
)
def test_an_engine_uses_of_the_cache_what_it_says(
    service: Service, use: CacheUse, served: bool, stored: bool
) -> None:
    known, new = prompt(1), prompt(10 + list(CacheUse).index(use))
    run(service, known)
    assert run(service, known) == CACHED
    assert run(service, known, use) == (CACHED if served else 0)
    assert run(service, new, use) == 0
    assert run(service, new) == (CACHED if stored else 0)


def test_a_pause_loses_nothing_in_any_tier(service: Service) -> None:
    tokens = prompt(30)
    run(service, tokens)
    with connect(service.socket, timeout_s=30.0) as client:
        client.flush()  # an empty queue is not yet the end of what was taken from it
    before = {tier.tier: tier.sealed_slots for tier in service.stats().tiers}
    pause(socket=service.socket)
    assert run(service, tokens) == 0
    assert run(service, prompt(31)) == 0
    assert {tier.tier: tier.sealed_slots for tier in service.stats().tiers} == before
    resume(socket=service.socket)
    assert run(service, tokens) == CACHED
    assert run(service, prompt(31)) == 0


def test_what_a_session_allows_itself_holds_over_a_restart_of_the_daemon(service: Service) -> None:
    device = DeviceSpec(hbm_bytes=64 * geometry().slot_bytes)
    with (
        connect(service.socket, timeout_s=30.0) as client,
        client.attach("engine", geometry(), device, use=CacheUse.READ) as session,
    ):
        service.kill_daemon()
        wait_for("the session again", lambda: session.connected and service.stats().sessions)
        wait_for("its use", lambda: service.stats().sessions[0].cache_use == pb.CACHE_USE_READ)


def test_a_dry_run_counts_by_tier(service: Service) -> None:
    tokens = prompt(40)
    run(service, tokens)
    before = service.stats().counters
    assert run(service, tokens + prompt(41), CacheUse.DRY_RUN) == 0
    after = service.stats().counters
    names = ("blocks_dry_run", "blocks_would_hit_hbm", "blocks_would_hit_dram", "blocks_would_hit_nvme")
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    assert counted["blocks_would_hit_hbm"] == BLOCKS
    assert counted["blocks_dry_run"] == (2 * (CACHED + 1) - 1) // BLOCK_TOKENS
