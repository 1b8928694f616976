"""The connector between SGLang's real classes: what one rank stores another finds, byte for byte, or nobody does."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvstore.config import ServeConfig
from kvstore.errors import ConfigError, InvalidArgument, KvstoreError, Unimplemented
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.sglang import standins
from tests.support.daemon import Service, started, wait_for

if not standins.is_installed():
    pytest.skip("needs SGLang: make test-sglang", allow_module_level=True)

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)

from engine_adapter.sglang import KvstoreHiCache
from tests.sglang.rank import PAGE, Rank, mha_pool, mla_pool

pytestmark = pytest.mark.engine

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
_FIRST = iter(range(1, 1 << 30))


def prompt(pages: int) -> list[int]:
    """A prompt that nobody else has, and a token over."""
    return [next(_FIRST), *range(1, pages * PAGE + 1)]


@pytest.fixture
def rank(service: Service) -> Iterator[Rank]:
    with Rank(service.socket, mha_pool("page_first")) as made:
        yield made.await_store()
    assert service.faults() == []


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------ the interface itself


def test_the_class_has_sglangs_signatures() -> None:
    """A parameter with another name or place would only show once SGLang calls it."""
    assert issubclass(KvstoreHiCache, HiCacheStorage)
    assert not KvstoreHiCache.__abstractmethods__
    for name, theirs in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        ours = getattr(KvstoreHiCache, name)
        if ours is not theirs:
            expected = [(p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()]
            found = [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()]
            assert found == expected, name


def test_every_call_of_sglang_is_answered_or_inherited_on_purpose() -> None:
    inherited = {
        name
        for name, function in inspect.getmembers(HiCacheStorage, inspect.isfunction)
        if getattr(KvstoreHiCache, name) is function
    }
    assert inherited == {"get_stats"}


# ------------------------------------------------------------ pages there and back


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_byte_for_byte(service: Service, layout: str, interface_v1: int) -> None:
    tokens = prompt(40)
    with Rank(service.socket, mha_pool(layout), interface_v1=interface_v1) as first:
        first.await_store()
        assert first.prefetch(tokens)[0] == 0
        indices = first.fill(tokens, seed=1)
        assert first.backup(tokens, indices) == 40 * PAGE
        wanted = first.pages(indices)
    with Rank(service.socket, mha_pool(layout), interface_v1=interface_v1) as second:
        second.await_store()
        came, places = second.prefetch(tokens)
        assert came == 40
        assert_same(second.pages(places), wanted)
        longer = [*tokens[: 10 * PAGE], *prompt(5)]
        came, places = second.prefetch(longer)
        assert came == 10
        assert_same(second.pages(places), wanted[:10])
    assert service.faults() == []


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_pages_of_a_latent_cache_come_back_too(service: Service, layout: str, interface_v1: int) -> None:
    tokens = prompt(6)
    options = {"interface_v1": interface_v1, "is_mla": True, "model": f"mla {layout}"}
    with (
        Rank(service.socket, mla_pool(layout), tp=(0, 4), **options) as writer,
        Rank(service.socket, mla_pool(layout), tp=(3, 4), **options) as reader,
    ):
        indices = writer.await_store().fill(tokens, seed=2)
        assert writer.backup(tokens, indices) == 6 * PAGE
        came, places = reader.await_store().prefetch(tokens)  # each rank has what rank 0 wrote
        assert came == 6
        assert_same(reader.pages(places), writer.pages(indices))


@pytest.mark.parametrize("pass_prefix", [False, True])
def test_a_prompt_that_grows_is_found_as_far_as_it_goes(service: Service, pass_prefix: bool) -> None:
    tokens = prompt(150)  # more than SGLang asks for at once
    with Rank(service.socket, mha_pool("page_first"), pass_prefix=pass_prefix) as rank:
        rank.await_store()
        pool = rank.pool
        for pages in (20, 100):
            indices = rank.fill(tokens[: pages * PAGE], seed=3)
            assert rank.backup(tokens[: pages * PAGE], indices) == pages * PAGE
            pool.free(indices)
        came, places = rank.prefetch(tokens)
        assert came == 100
        again = rank.fill(tokens[: 20 * PAGE], seed=3)
        assert_same(rank.pages(places)[:20], rank.pages(again))


def test_only_whole_pages_are_kept(rank: Rank) -> None:
    tokens = prompt(0)[:1] + [5] * (PAGE - 2)
    assert rank.hashes(tokens) == []
    assert rank.backup(tokens, rank.fill(tokens, seed=4)) == 0
    assert rank.prefetch(tokens)[0] == 0


# ------------------------------------------------------------ what must not meet


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"weights": "tiny@2"},
        {"tp": (0, 2)},
        {"tp": (1, 2)},
        {"is_mla": True},
        {"interface_v1": 0},
    ],
)
def test_other_models_ranks_and_ways_find_nothing(
    service: Service, rank: Rank, other: dict[str, object]
) -> None:
    tokens = prompt(4)
    rank.backup(tokens, rank.fill(tokens, seed=5))
    with Rank(service.socket, mha_pool("page_first"), **other) as stranger:  # type: ignore[arg-type]
        stranger.await_store()
        assert stranger.prefetch(tokens)[0] == 0
        assert stranger.backend.batch_exists(stranger.hashes(tokens)) == 0
    assert rank.prefetch(tokens)[0] == 4


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "page_first"])
def test_another_order_of_bytes_finds_nothing(service: Service, rank: Rank, layout: str) -> None:
    """Pages of all layouts have as many bytes, so nothing else would tell them apart."""
    tokens = prompt(4)
    rank.backup(tokens, rank.fill(tokens, seed=6))
    with Rank(service.socket, mha_pool(layout)) as other:
        assert other.await_store().prefetch(tokens)[0] == 0


def test_another_type_of_as_many_bytes_finds_nothing(service: Service) -> None:
    tokens = prompt(4)
    with (
        Rank(service.socket, mha_pool("page_first", torch.bfloat16)) as one,
        Rank(service.socket, mha_pool("page_first", torch.float16)) as other,
    ):
        one.await_store().backup(tokens, one.fill(tokens, seed=7))
        assert other.await_store().prefetch(tokens)[0] == 0
        assert one.prefetch(tokens)[0] == 4


def test_adapters_and_salts_of_requests_are_in_sglangs_hash(rank: Rank) -> None:
    """The connector relies on it: a LoRA is in the extra key, and a salt that looks like it is another thing."""
    tokens = prompt(3)
    rank.backup(tokens, rank.fill(tokens, seed=8), extra_key="a")
    assert rank.prefetch(tokens)[0] == 0
    assert rank.prefetch(tokens, extra_key="b")[0] == 0
    assert rank.prefetch(tokens, cache_salt="a")[0] == 0
    assert rank.prefetch(tokens, extra_key="a")[0] == 3
    assert rank.prefetch(tokens, extra_key="a", cache_salt="a")[0] == 0


def test_both_ways_of_one_backend_keep_apart(rank: Rank) -> None:
    """`set` writes a page in another order than `batch_set_v1` for some layouts."""
    tokens = prompt(2)
    indices = rank.fill(tokens, seed=9)
    pages, hashes = rank.pages(indices), rank.hashes(tokens)
    assert rank.backend.batch_set(hashes, pages)
    assert rank.prefetch(tokens)[0] == 0
    assert rank.backend.batch_get_v1(hashes, rank.pool.alloc(2 * PAGE)) == [False, False]
    got = rank.backend.batch_get(hashes, [torch.zeros_like(page) for page in pages])
    assert_same(got, pages)
    assert_same([rank.backend.get(hashes[0], torch.zeros_like(pages[0]))], pages[:1])
    assert_same(rank.backend.batch_get(hashes), pages)
    assert rank.backend.get("unknown", torch.zeros_like(pages[0])) is None


def test_what_is_no_page_is_refused(rank: Rank) -> None:
    page = rank.pages(rank.fill(prompt(1), seed=10))[0]
    assert not rank.backend.set("short", page[:-1])
    assert not rank.backend.set("none", None)
    assert rank.backend.set("strided", torch.stack([page, page], dim=1)[:, 0])
    assert torch.equal(rank.backend.get("strided", torch.zeros_like(page)), page)
    assert rank.backend.get("strided", torch.zeros(3)) is None
    assert rank.backend.batch_set_v1(["a", "b"], rank.pool.alloc(PAGE)) == [False, False]
    assert rank.backend.batch_get_v1(["a"], rank.pool.alloc(2 * PAGE)) == [False]


# ------------------------------------------------------------ settings and what is not supported


def test_weights_must_have_a_name(service: Service, tmp_path: object) -> None:
    with pytest.raises(InvalidArgument, match="name them"):
        Rank(service.socket, mha_pool("page_first"), weights=None)


def test_a_setting_that_is_unknown_is_refused(service: Service) -> None:
    with pytest.raises(ConfigError, match="has no setting 'sockets'"):
        Rank(service.socket, mha_pool("page_first"), sockets="x")


def test_models_with_other_state_than_kv_are_refused_at_the_start(service: Service) -> None:
    with Rank(service.socket, mha_pool("page_first")) as rank:
        rank.backend.register_mem_host_pool_v2(rank.pool, PoolName.KV)
        rank.backend.on_host_pools_registered()
        rank.backend.register_mem_host_pool_v2(rank.pool, PoolName.MAMBA)
        with pytest.raises(Unimplemented, match="mamba"):
            rank.backend.on_host_pools_registered()


def test_calls_for_several_pools_are_misses(rank: Rank) -> None:
    tokens = prompt(3)
    rank.backup(tokens, rank.fill(tokens, seed=11))
    hashes, transfer = rank.hashes(tokens), PoolTransfer(name=PoolName.SWA, keys=["a", "b"])
    assert rank.backend.batch_exists_v2(hashes).kv_hit_pages == 3
    assert rank.backend.batch_exists_v2(hashes, [transfer]).kv_hit_pages == 0
    assert rank.backend.batch_get_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert rank.backend.batch_set_v2([transfer]) == {PoolName.SWA: [False, False]}


# ------------------------------------------------------------ what dies, and what fails


def test_everything_may_die_and_pages_come_from_disk(own_config: ServeConfig) -> None:
    tokens = prompt(30)
    with started(own_config) as service, Rank(own_config.socket, mha_pool("layer_first")) as rank:
        indices = rank.await_store().fill(tokens, seed=12)
        assert rank.backup(tokens, indices) == 30 * PAGE
        wanted = rank.pages(indices)
        service.kill_daemon()
        wait_for("a hit again", lambda: rank.prefetch(tokens)[0] == 30)
        service.call("Flush", pb.FlushRequest(deadline_ms=20_000), timeout_s=30.0)
        for pid in (service.keeper_pid, service.daemon_pid):
            os.kill(pid, signal.SIGKILL)
    with started(own_config) as service, Rank(own_config.socket, mha_pool("layer_first")) as rank:
        rank.await_store()

        def from_disk() -> list[torch.Tensor] | None:
            came, places = rank.prefetch(tokens)
            pages = rank.pages(places)
            rank.pool.free(places)
            return pages if came == 30 else None

        assert_same(wait_for("pages from disk", from_disk), wanted)
        assert service.faults() == []


def test_a_daemon_that_is_killed_again_and_again_gives_no_wrong_page(own_config: ServeConfig) -> None:
    """Loads and stores are under way at each kill; whatever is said to have come is compared byte for byte."""
    with started(own_config) as service, Rank(own_config.socket, mha_pool("page_first")) as rank:
        rank.await_store()
        prompts = [prompt(12) for _ in range(8)]
        found, kills, until_s = 0, 0, time.monotonic() + 60.0
        while kills < 3:
            assert time.monotonic() < until_s
            for seed, tokens in enumerate(prompts):
                indices = rank.fill(tokens, seed=seed)
                rank.backup(tokens, indices)
                came, places = rank.prefetch(tokens)
                assert_same(rank.pages(places)[:came], rank.pages(indices)[:came])
                found += came
                rank.pool.free(indices)
                rank.pool.free(places)
                if seed == 4:
                    with contextlib.suppress(KvstoreError):  # it is not back yet
                        os.kill(service.daemon_pid, signal.SIGKILL)
                        kills += 1
        assert found > 0
        wait_for("hits again", lambda: rank.prefetch(prompts[0])[0] == 12)
        assert service.faults() == []


def test_without_a_daemon_everything_is_a_miss_at_once(own_config: ServeConfig) -> None:
    tokens = prompt(5)
    with Rank(own_config.socket, mha_pool("page_first")) as rank:
        began = time.monotonic()
        assert rank.prefetch(tokens)[0] == 0
        indices = rank.fill(tokens, seed=13)
        assert rank.backup(tokens, indices) == 0
        assert not rank.backend.exists("a")
        assert time.monotonic() - began < 1.0
        with started(own_config):
            rank.await_store()
            assert rank.backup(tokens, indices) == 5 * PAGE
            assert rank.prefetch(tokens)[0] == 5


def test_under_sglangs_own_failure_injector_no_page_is_wrong(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.name, "0.3")
    with Rank(service.socket, mha_pool("page_first")) as rank:
        assert type(rank.backend) is not KvstoreHiCache
        rank.await_store()
        found = 0
        for seed in range(40):
            tokens = prompt(3)
            indices = rank.fill(tokens, seed=seed)
            rank.backup(tokens, indices)
            came, places = rank.prefetch(tokens)
            assert_same(rank.pages(places)[:came], rank.pages(indices)[:came])
            found += came
            rank.pool.free(indices)
            rank.pool.free(places)
        assert 0 < found < 120


def test_clear_forgets_this_rank_alone(service: Service, rank: Rank) -> None:
    tokens = prompt(3)
    with Rank(service.socket, mha_pool("page_first"), tp=(1, 2)) as other:
        other.await_store().backup(tokens, other.fill(tokens, seed=14))
        rank.backup(tokens, rank.fill(tokens, seed=15))
        rank.backend.clear()
        assert rank.prefetch(tokens)[0] == 0
        assert other.prefetch(tokens)[0] == 3


def test_the_hit_query_takes_a_prompt_of_any_length(rank: Rank) -> None:
    """The query names a whole prompt at once, and more pages than one message of the protocol may."""
    keys = [f"{number:064x}" for number in range(20_000)]
    assert rank.backend.batch_exists(keys, HiCacheStorageExtraInfo(prefix_keys=[])) == 0
    page = rank.pages(rank.fill(prompt(1), seed=16))[0]
    assert rank.backend.batch_set(keys[:3], [page] * 3)
