"""The daemon's policies: as configured, shown by status, and outranked by what an engine says."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import StopReason
from kvstore.config import ServeConfig
from kvstore.daemon.policies import begin_policies, policy_fields, resize_policies
from kvstore.errors import ConfigError
from kvstore.layout import Tier
from kvstore.units import MIB
from tests.kvstore.store_rig import PAGE, Rig, chain
from tests.kvstore.transfer.conftest import Engine, engine, many, parts
from tests.support.command import kvstore
from tests.support.daemon import Service, small_config, started

BLOCKS = 16 * MIB // 16_384
"""Of the service's DRAM."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with (
        tempfile.TemporaryDirectory(prefix="kv") as name,
        started(small_config(Path(name), dram_bytes=16 * MIB, dram_policy="auto")) as service,
    ):
        yield service


def fill(one: Engine, seeds: range) -> None:
    """Prompts of an eighth of DRAM each."""
    for seed in seeds:
        one.store(many(seed, BLOCKS // 8))


def test_a_full_tier_goes_by_its_policy_and_status_says_so(service: Service) -> None:
    with engine(service, parts()) as one:
        fill(one, range(1, 20))
        assert service.stats().counters["evictions_dram"] > BLOCKS
        assert one.served(one.hashes(many(19, BLOCKS // 8))) == BLOCKS // 8
    status = ("status", "--socket", service.socket)
    tiers = json.loads(kvstore(*status, "--json").stdout)["tiers"]
    of_tier = {tier["tier"]: tier for tier in tiers}
    assert [of_tier[name]["policy"] for name in ("hbm", "dram", "nvme")] == ["lru", "auto", "lru"]
    assert of_tier["dram"]["in_charge"] == "lru"  # nothing is learned yet
    assert set(of_tier["dram"]["shadows"]) == {"lru"}
    shown = kvstore(*status).stdout
    assert "dram goes by auto, which follows lru" in shown


def test_what_an_engine_retains_stays(service: Service) -> None:
    with engine(service, parts("retained")) as one:
        kept = one.store(many(1, BLOCKS // 8))
        one.session.retain(one.namespace, kept, stop=StopReason.TOOL_USE, priority=50, ttl_ms=600_000)
        one.session.step()
        fill(one, range(20, 40))
        assert one.served(kept) == BLOCKS // 8
        one.session.retain(one.namespace, kept)
        one.session.step()
        fill(one, range(40, 60))
        assert one.served(kept) < BLOCKS // 8


def test_a_policy_that_nobody_registered_is_refused_with_the_names_of_those_there_are() -> None:
    config = ServeConfig(socket="/run/kv.sock", nvme_policy="clairvoyant")
    with pytest.raises(
        ConfigError, match=r"nvme_policy: no eviction policy is named 'clairvoyant'.*arc, auto, fifo"
    ):
        begin_policies(Rig().store, config)


def test_a_tier_of_another_size_begins_anew_and_loses_nothing() -> None:
    rig = Rig(hbm=16, dram=8, nvme=0)
    rankings = rig.store.hints.rankings
    begin_policies(rig.store, ServeConfig(socket="/run/kv.sock", dram_bytes=64 * MIB, dram_policy="hazard"))
    assert policy_fields(rankings, Tier.DRAM) == {"policy": "hazard"}
    assert policy_fields(rankings, Tier.NVME) == {"policy": "lru"}
    session = rig.attach()
    rig.write_through(session, chain(4))
    rankings.tell(1.0)
    ranking = rankings.get(Tier.DRAM)
    assert ranking is not None
    assert len(ranking) == 4
    resize_policies(rankings, 65 * MIB, 0)
    assert len(ranking) == 4, "hardly another size"
    resize_policies(rankings, 8 * PAGE, 0)
    assert len(ranking) == 0
    rig.evict_hbm()
    rig.write_through(session, chain(6, seed=2))
    rig.evict_hbm()
    assert rig.store._state.table.locate(chain(6, seed=2), rig.namespaces[session]).max() < 256
    rig.check()
