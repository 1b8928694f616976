"""Blocks that a worker left in HBM alone are copied down by the next one, and no others are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
BLOCKS = 6


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service
        assert service.faults() == []


class NoStores(TwinCopier):
    """A copier that copies nothing down, as that of a worker which dies before it does."""

    def submit(self, batch: CopyBatch) -> bool:
        return batch.direction is not Direction.STORE and super().submit(batch)


def leave_orphans(service: Service, prompts: list[list[int]]) -> None:
    """A worker that comes, computes, and goes; its blocks are in HBM alone."""
    before = stores(service)
    with attached(service.socket, "first", copier=NoStores()) as engine:
        for number, tokens in enumerate(prompts):
            engine.run(f"cold{number}", tokens)
    assert stores(service) == before


def stores(service: Service) -> int:
    """Blocks copied down so far."""
    return int(service.stats().counters.get("stores", 0))


def adopted(service: Service, engine: Driver, blocks: int) -> bool:
    """One step of an engine that has nothing to do; whether so many blocks were copied down."""
    engine.blocks.end_step()
    return stores(service) >= blocks


def test_the_next_worker_saves_what_was_in_hbm_alone(service: Service) -> None:
    """Blocks that were sealed and not yet copied when their worker was killed were lost with the HBM, used or not."""
    prompts = [[number, *range(BLOCKS * B)] for number in range(8)]
    leave_orphans(service, prompts)
    with attached(service.socket, "second") as engine:
        wait_for("the copies", lambda: adopted(service, engine, 8 * BLOCKS))
        assert engine.blocks.adoption.adopted_blocks == 8 * BLOCKS
        engine.settle()
        engine.await_nothing_used()
    assert stores(service) == 8 * BLOCKS
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    with attached(service.socket, "third") as engine:
        for number, tokens in enumerate(prompts):
            assert engine.run(f"warm{number}", tokens).cached_by_tier == {"dram": BLOCKS * B}


def test_only_the_end_of_a_chain_that_is_saved_is_copied(service: Service) -> None:
    tokens = [1, *range(BLOCKS * B)]
    with attached(service.socket, "before") as engine:
        engine.run("short", tokens[: 4 * B])
        engine.settle()
    saved = stores(service)
    assert saved == 4
    leave_orphans(service, [tokens])
    with attached(service.socket, "second") as engine:
        wait_for("the copies", lambda: adopted(service, engine, BLOCKS))
        engine.settle()
        assert engine.blocks.adoption.adopted_blocks == BLOCKS - saved
        engine.await_nothing_used()
    assert stores(service) == BLOCKS


def test_conversations_of_one_system_prompt_are_all_saved(service: Service) -> None:
    system = [7, *range(4 * B - 1)]
    prompts = [[*system, 100 + number, *range(3 * B - 1)] for number in range(6)]
    leave_orphans(service, prompts)
    blocks = 4 + 6 * 3
    with attached(service.socket, "second") as engine:
        wait_for("the copies", lambda: adopted(service, engine, blocks))
        engine.settle()
        assert engine.blocks.adoption.adopted_blocks == blocks, "the common part is copied once"
        engine.await_nothing_used()
    assert stores(service) == blocks


def test_what_is_saved_or_in_use_is_left_alone(service: Service) -> None:
    with attached(service.socket, "saved") as engine:
        engine.run("cold", [1, *range(BLOCKS * B)])
        engine.settle()
    with attached(service.socket, "in use", copier=NoStores()) as user:
        request = user.enqueue("running", [2, *range(BLOCKS * B)])
        user.admit(request)
        user.fill(request, 0)
        user.blocks.end_step()
        user.settle()
        with attached(service.socket, "second") as engine:
            for _ in range(20):
                assert not adopted(service, engine, BLOCKS + 1)
                engine.blocks.wait(0.01)
            assert engine.blocks.adoption.adopted_blocks == 0
        user.release(request)
    assert stores(service) == BLOCKS


def test_what_is_dropped_before_it_is_asked_for_is_passed_over(service: Service) -> None:
    """The tables are only a hint: between the look and the lease an administrator may have cleared everything."""
    leave_orphans(service, [[number, *range(BLOCKS * B)] for number in range(4)])
    with attached(service.socket, "second") as engine:
        service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
        for _ in range(20):
            assert not adopted(service, engine, 1)
            engine.blocks.wait(0.01)
        assert engine.blocks.adoption.adopted_blocks == 0
        engine.await_nothing_used()
        assert engine.run("cold", [0, *range(BLOCKS * B)]).cached_tokens == 0
