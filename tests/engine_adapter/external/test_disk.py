"""Blocks that only a disk has: read ahead while their request waits, or brought up by the load itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine_adapter.external.link import Identity
from kvstore.client import connect
from kvstore.units import MIB
from tests.engine_adapter.external.host_engine import BLOCK, HostEngine
from tests.engine_adapter.external.test_scheduling import tokens
from tests.support.daemon import Service, kill_everything, small_config, started, wait_for

PROMPTS, BLOCKS = 14, 24


@pytest.fixture
def service() -> Iterator[Service]:
    """1 MiB of DRAM, 256 slots: less than half of what the test stores."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(
            Path(name),
            dram_bytes=1 * MIB,
            dram_extent_bytes=1 * MIB,
            nvme_bytes=64 * MIB,
            nvme_extent_bytes=4 * MIB,
        )
        with started(config) as running:
            yield running


def stored(engine: HostEngine, prompt: list[int]) -> bool:
    """Asks for it; whether all of its blocks are cached. Some are left out while there is no room for them."""
    engine.ask(f"cold {len(engine.finished)}", prompt)
    engine.forget()
    session, namespace = engine.link.attached, engine.link.namespace(Identity())
    assert session is not None
    assert namespace is not None
    return session.match(namespace, namespace.chain(prompt).hashes).hits == BLOCKS


def test_what_only_a_disk_has_is_waited_for_and_loaded(service: Service) -> None:
    with connect(service.socket) as client:
        engine = HostEngine(service.socket, num_pages=256, room=64)
        try:
            engine.attached()
            prompts = [tokens(1000 + number, BLOCKS * BLOCK + 1) for number in range(PROMPTS)]
            for number, prompt in enumerate(prompts):
                wait_for(f"all of prompt {number}", partial(stored, engine, prompt))
                if number % 4 == 3 or number == PROMPTS - 1:
                    # Before DRAM is full: what is not on disk by then would be gone.
                    assert not client.flush(60.0).pending_blocks
            wait_for(
                "less in DRAM than was stored", lambda: service.tier("dram").sealed_slots < PROMPTS * BLOCKS
            )
            found = []
            for prompt in prompts:
                found.append(engine.ask(f"warm {len(engine.finished)}", prompt))
                engine.forget()
            assert found == [BLOCKS * BLOCK] * PROMPTS
            assert engine.bad == []
            assert service.stats().counters["promotions"] > 0
            assert service.faults() == []
        finally:
            engine.close()


def test_an_engine_that_outlives_all_of_the_service_hits_what_the_disk_has(service: Service) -> None:
    """What is asked while nothing is there waits for the next service, and for its disk."""
    engine = HostEngine(service.socket)
    try:
        engine.attached()
        prompt = tokens(77, BLOCKS * BLOCK + 1)
        wait_for("all of the prompt", partial(stored, engine, prompt))
        with connect(service.socket) as client:
            assert not client.flush(60.0).pending_blocks
        kill_everything(service)
        session = engine.link.attached
        wait_for("a lost stream", lambda: session is not None and not session.connected)
        engine.add("asked meanwhile", prompt)
        assert engine.scheduling.matched("asked meanwhile", len(prompt), 0) is None
        with started(service.config) as again:
            engine.run(lambda: "asked meanwhile" in engine.finished)
            assert engine.finished["asked meanwhile"].cached == BLOCKS * BLOCK
            assert engine.bad == []
            assert again.faults() == []
    finally:
        engine.close()
