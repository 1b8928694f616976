"""Tenants of a running service, and a cache that is used in part: by everybody, a tenant, a namespace or a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.cache_use import CacheUse
from kvstore.cli.pause import pause, set_use
from kvstore.cli.resume import resume
from kvstore.cli.status import status
from kvstore.daemon.metrics import StatsCollector
from kvstore.errors import ConfigError, InvalidArgument, NotFound
from kvstore.tenant import Tenant
from kvstore.units import MIB
from kvstore.wire.v1 import health_pb2, health_pb2_grpc
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient, namespace_parts

Make = Callable[[], RawClient]
MISSES, HITS = [pb.OUTCOME_MISS] * 10, [pb.OUTCOME_HIT_HBM] * 10
PUBLISHED, DROPPED = [pb.SEAL_OUTCOME_PUBLISHED] * 10, [pb.SEAL_OUTCOME_DUPLICATE] * 10
TENANTS = (
    Tenant(name="alice", hbm_quota_bytes=20 * SLOT_BYTES, dram_reserve_bytes=32 * MIB),
    Tenant(name="bob"),
    Tenant(name="carol", cache=CacheUse.OFF),
)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with started(small_config(folder, tenants=TENANTS)) as service:
        yield service


@pytest.fixture(autouse=True)
def all_in_use(service: Service) -> Iterator[None]:
    yield
    for tenant in ("", "alice", "bob"):
        service.call("Pause", pb.PauseRequest(tenant=tenant), service="admin")
    assert service.stats().cache_use == pb.CACHE_USE_ON


def begin(client: Make, tenant: str, **changes: object) -> RawClient:
    """A client whose namespace is a tenant's."""
    made = client().begin(**changes)
    parts = [*namespace_parts(), pb.NamespacePart(tag="tenant", value=tenant.encode())]
    request = pb.OpenNamespaceRequest(token=made.token, parts=parts)
    made.ns = made.stub.OpenNamespace(request, timeout=DEADLINE_S)
    return made


def ask(client: RawClient, tokens: range, lease: int) -> list[int]:
    """The outcomes of a prompt, of which everything is let go of at once."""
    granted = client.acquire(client.chain(tokens), lease=lease)
    client.release(hbm=granted.hbm.tolist())
    return granted.outcomes


def tenants(service: Service) -> dict[str, pb.TenantStats]:
    return {item.tenant: item for item in service.stats().tenants}


def test_each_tenants_blocks_hits_and_bounds_are_told(client: Make, service: Service) -> None:
    alice, bob, eve = (begin(client, name) for name in ("alice", "bob", "eve"))
    before = tenants(service)["alice"].hit_blocks
    alice.fill(range(40))
    bob.fill(range(20))
    eve.fill(range(8))
    assert ask(alice, range(40), 2) == HITS
    found = tenants(service)
    assert list(found) == ["*", "alice", "bob", "carol"]
    hbm = {name: item.tiers[0].used_bytes // SLOT_BYTES for name, item in found.items()}
    assert hbm == {"*": 2, "alice": 10, "bob": 5, "carol": 0}
    assert found["alice"].tiers[0].quota_bytes == 20 * SLOT_BYTES
    assert found["alice"].tiers[1].reserve_bytes == 32 * MIB
    assert found["alice"].hit_blocks - before == 10
    metrics = {metric.name: metric for metric in StatsCollector(service.stats).collect()}
    used = {tuple(each.labels.values()): each.value for each in metrics["kvstore_tenant_used_bytes"].samples}
    assert used["alice", "hbm"] == 10 * SLOT_BYTES
    assert {tenant for tenant, _ in used} == set(found), "no label for a name that only a client says"


def test_over_its_quota_a_tenant_gives_first_also_where_others_are_older(
    client: Make, service: Service
) -> None:
    bob = begin(client, "bob", hbm_slots=64)
    _, granted = bob.fill(range(80))
    bob.release(hbm=granted.hbm.tolist())
    alice = begin(client, "alice", hbm_slots=0)
    _, granted = alice.fill(range(1000, 1000 + 4 * 30))
    alice.release(hbm=granted.hbm.tolist())
    bob.fill(range(2000, 2000 + 4 * 12))

    def alice_has() -> int:
        return tenants(service)["alice"].tiers[0].used_bytes // SLOT_BYTES

    wait_for("free slots again", lambda: service.tier("hbm").free_slots == 8)
    assert alice_has() == 24
    assert ask(bob, range(80), 9) == [pb.OUTCOME_HIT_HBM] * 20, "Bob's are older, and stayed"


def test_what_is_reserved_is_checked_when_a_tier_becomes_smaller(service: Service) -> None:
    with pytest.raises(
        (ConfigError, InvalidArgument), match="less than the 32MiB that tenants have reserved"
    ):
        service.call("Resize", pb.ResizeRequest(tier="dram", capacity_bytes=16 * MIB), service="admin")
    assert service.tier("dram").capacity_bytes == 64 * MIB


def test_a_paused_tenant_misses_and_stores_nothing_while_others_go_on(client: Make, service: Service) -> None:
    alice, bob = begin(client, "alice"), begin(client, "bob")
    alice.fill(range(40))
    bob.fill(range(40))
    dropped = service.stats().counters["seals_dropped"]
    pause(tenant="alice", socket=service.socket)
    granted = alice.acquire(alice.chain(range(40)), lease=2)
    assert granted.outcomes == MISSES
    assert alice.seal(alice.seals(alice.chain(range(40)), granted)) == DROPPED
    alice.release(hbm=granted.hbm.tolist())
    assert ask(bob, range(40), 2) == HITS
    stats = service.stats()
    assert "that are not served in full: 1; `kvstore status` lists" in " ".join(stats.warnings)
    assert "`kvstore resume --tenant alice` ends that" in " ".join(stats.warnings), "a bare `resume` does not"
    assert stats.counters["seals_dropped"] - dropped == 10
    assert not stats.paused
    assert ("alice", pb.CACHE_USE_OFF) in {(item.tenant, item.cache_use) for item in stats.restricted}
    resume(tenant="alice", socket=service.socket)
    assert ask(alice, range(40), 3) == HITS, "what there was has stayed"
    assert "served in full" not in " ".join(service.stats().warnings), "what is configured is no warning"


def test_a_tenant_can_be_out_of_use_from_the_start(client: Make, service: Service) -> None:
    carol = begin(client, "carol")
    granted = carol.acquire(carol.chain(range(40)))
    assert carol.seal(carol.seals(carol.chain(range(40)), granted)) == DROPPED
    assert tenants(service)["carol"].tiers[0].used_bytes == 0


def test_one_namespace_is_paused_by_its_digits(
    client: Make, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    one = client().begin(model="one")
    other = client().begin(model="two", hbm_slots=0)
    one.fill(range(40))
    other.fill(range(40))
    pause(namespace="one", socket=service.socket, as_json=True)
    digest = json.loads(capsys.readouterr().out)["namespace"]
    assert ask(one, range(40), 2) == MISSES
    assert ask(other, range(40), 2) == HITS
    status(socket=service.socket)
    assert f"namespace {digest}: cache off" in capsys.readouterr().out.replace("\n", " ")
    set_use(CacheUse.ON, None, digest[:12], service.socket, as_json=False)
    assert ask(one, range(40), 3) == HITS
    with pytest.raises(NotFound, match="no namespace 'three'"):
        pause(namespace="three", socket=service.socket)
    with pytest.raises(InvalidArgument, match="not both"):
        pause(namespace="one", tenant="alice", socket=service.socket)


def test_a_dry_run_gives_nothing_and_says_what_it_would_have_given(
    client: Make, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    one = client().begin()
    hashes, granted = one.fill(range(40))
    one.release(hbm=granted.hbm.tolist())
    before = service.stats().counters
    pause(cache="dry-run", socket=service.socket)
    longer = one.chain(range(80))
    granted = one.acquire(longer, lease=2)
    assert granted.outcomes == [pb.OUTCOME_MISS] * 20
    sealed = one.seal(one.seals(longer, granted))
    assert sealed == DROPPED + PUBLISHED, "what was not there is stored, so that the next lookup counts"
    one.release(hbm=granted.hbm.tolist())
    assert ask(one, range(80), 3) == [pb.OUTCOME_MISS] * 20
    after = service.stats().counters
    counted = {name: after[name] - before[name] for name in ("blocks_dry_run", "blocks_would_hit_hbm")}
    assert counted == {"blocks_dry_run": 40, "blocks_would_hit_hbm": 30}
    assert after["seals_dropped"] == before["seals_dropped"]
    capsys.readouterr()
    status(socket=service.socket)
    shown = capsys.readouterr().out
    assert "in a dry run" in shown
    assert "dry run: would have hit 75.0% of 40 blocks (hbm 75.0%)" in shown
    resume(socket=service.socket)
    assert ask(one, range(80), 4) == [pb.OUTCOME_HIT_HBM] * 20
    assert len(hashes) == 10


@pytest.mark.parametrize(
    "use, served, stored",
    [
        (pb.CACHE_USE_ON, True, True),
        (pb.CACHE_USE_READ, True, False),
        (pb.CACHE_USE_WRITE, False, True),
        (pb.CACHE_USE_OFF, False, False),
        (pb.CACHE_USE_DRY_RUN, False, True),
    ],
)
def test_a_session_bypasses_the_cache_by_itself(
    client: Make, service: Service, use: int, served: bool, stored: bool
) -> None:
    usual = client().begin()
    usual.fill(range(40))
    other = client().begin(hbm_slots=0, cache_use=use)
    assert ask(other, range(40), 1) == (HITS if served else MISSES)
    new = other.chain(range(500, 540))
    granted = other.acquire(new, lease=2)
    assert granted.outcomes == MISSES
    seen = usual.acquire(new, lease=2)
    waits = [pb.OUTCOME_PENDING] * 10 if stored else MISSES
    assert seen.outcomes == waits, "nobody waits for a block that is never stored"
    usual.release(hbm=[slot for slot in seen.hbm.tolist() if slot != 0xFFFFFFFF])
    assert other.seal(other.seals(new, granted)) == (PUBLISHED if stored else DROPPED)
    assert ask(usual, range(500, 540), 3) == (HITS if stored else MISSES)
    item = next(item for item in service.stats().sessions if item.session == other.attached.session)
    assert item.cache_use == use


def test_while_paused_engines_still_get_slots_to_decode_in_and_no_room(
    client: Make, service: Service
) -> None:
    """A pause gave no credit: whoever was decoding stood still at the end of its slots until it was over."""
    one = client().begin()
    pause(socket=service.socket)
    one.step(want_slots=4, want_room=4)
    slots = one.receive_body("slots").slots
    assert len(slots.hbm_slots) == 16
    assert slots.dram_slots == b""
    resume(socket=service.socket)
    assert len(one.receive_body("slots").slots.dram_slots) == 16, "what was asked for before comes then"


def test_pausing_shows_in_status_health_and_metrics(
    client: Make, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    def health() -> int:
        with grpc.insecure_channel(f"unix:{service.socket}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service="cache"), timeout=DEADLINE_S)
        return int(reply.status)

    assert health() == health_pb2.HealthCheckResponse.SERVING
    pause(socket=service.socket)
    assert health() == health_pb2.HealthCheckResponse.NOT_SERVING
    metrics = {metric.name: metric.samples for metric in StatsCollector(service.stats).collect()}
    assert metrics["kvstore_paused"][0].value == 1
    assert metrics["kvstore_cache_reads"][0].value == metrics["kvstore_cache_writes"][0].value == 0
    capsys.readouterr()
    status(socket=service.socket)
    shown = capsys.readouterr().out
    assert " paused, up" in shown
    assert "`kvstore resume` ends that" in " ".join(shown.split())
    status(socket=service.socket, as_json=True)
    assert json.loads(capsys.readouterr().out)["cache"] == "off"


def test_a_restart_resumes_and_begins_as_the_configuration_says(folder: Path) -> None:
    """And what sessions allow themselves is said again when they resume."""
    place = folder / "r"
    place.mkdir()
    config = small_config(place, tenants=TENANTS, cache=CacheUse.READ)
    with started(config) as service:
        assert service.stats().cache_use == pb.CACHE_USE_READ
        service.call("Pause", pb.PauseRequest(), service="admin")
        service.call("Pause", pb.PauseRequest(paused=True, tenant="alice"), service="admin")
        stats = service.stats()
        assert stats.cache_use == pb.CACHE_USE_ON
        assert [item.tenant for item in stats.restricted] == ["alice", "carol"]
        service.kill_daemon()
        stats = wait_for("the daemon", service.stats)
        assert stats.cache_use == pb.CACHE_USE_READ
        assert [item.tenant for item in stats.restricted] == ["carol"]
