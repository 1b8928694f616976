"""When a load comes in groups of layers, and how far it is."""

from __future__ import annotations

import threading
import time

import pytest

from engine_adapter.loading.arrival import Arrival
from engine_adapter.loading.layer_groups import LayerGroups, layer_groups_of
from kvstore.geometry import Geometry, LayerGroup
from kvstore.planning.speeds import PrefillSpeed, TierSpeed
from tests.support.daemon import wait_for

BLOCKS, CACHED, NEW = 4096, 131_072, 4096
DRAM = TierSpeed(start_s=1e-4, byte_s=1 / 55e9)


def shape(layers: int = 32, kv_heads: int = 8, dtype: str = "bfloat16") -> Geometry:
    """An 8B model's: 128 KiB a layer, 4 MiB a block."""
    group = LayerGroup(layers=layers, kv_heads=kv_heads, head_dim=128, block_tokens=32)
    return Geometry(groups=(group,), dtype=dtype)


def rule(**changes: int) -> LayerGroups:
    return layer_groups_of(shape(), **{"chunk_tokens": 8192, **changes})


@pytest.mark.parametrize(
    "layers, least_bytes, groups",
    [(32, 1 << 20, 4), (36, 1 << 20, 4), (32, 1 << 19, 8), (32, 1, 32), (32, 1 << 30, 1), (31, 1 << 20, 1)],
)
def test_a_group_is_a_whole_number_of_layers_and_large_enough(
    layers: int, least_bytes: int, groups: int
) -> None:
    found = layer_groups_of(shape(layers), chunk_tokens=8192, least_bytes=least_bytes)
    assert found.most == groups
    assert shape(layers).slot_bytes % groups == 0
    assert shape(layers).slot_bytes // groups >= least_bytes or groups == 1


def test_slots_with_padding_come_whole() -> None:
    odd = Geometry(groups=(LayerGroup(layers=2, kv_heads=1, head_dim=1, block_tokens=8),), dtype="float32")
    assert odd.slot_bytes > odd.payload_bytes
    assert layer_groups_of(odd, chunk_tokens=64, least_bytes=1).most == 1


@pytest.mark.parametrize("new, groups", [(1, 1), (1023, 1), (1024, 4), (4096, 4), (100_000, 4)])
def test_few_tokens_hide_no_load(new: int, groups: int) -> None:
    assert rule().choose(blocks=BLOCKS, cached_tokens=CACHED, num_tokens=CACHED + new) == groups


def test_only_the_first_step_hides_a_load() -> None:
    small = rule(chunk_tokens=512)
    assert small.choose(blocks=BLOCKS, cached_tokens=CACHED, num_tokens=CACHED + NEW) == 1
    assert rule().choose(blocks=0, cached_tokens=CACHED, num_tokens=CACHED + NEW) == 1


@pytest.mark.parametrize(
    "token_s, groups",
    [(120e-6, 4), (20e-6, 4), (15e-6, 1), (1e-6, 1)],  # 0.49, 0.08, 0.06 and 0.004 s beside a load of 0.31 s
)
def test_what_was_measured_decides(token_s: float, groups: int) -> None:
    prefill = PrefillSpeed(step_s=0.0, token_s=token_s, context_s=0.0)
    found = rule().choose(
        blocks=BLOCKS, cached_tokens=CACHED, num_tokens=CACHED + NEW, prefill=prefill, dram=DRAM
    )
    assert found == groups


def test_a_layer_waits_for_its_group() -> None:
    arrival = Arrival(layers=8, groups=4)
    passed: list[int] = []

    def layers() -> None:
        for layer in range(8):
            assert arrival.wait_for(layer)
            passed.append(layer)

    thread = threading.Thread(target=layers)
    thread.start()
    for group in range(4):
        wait_for("the layers that may go", lambda group=group: len(passed) >= 2 * group)
        time.sleep(0.02)
        assert passed == list(range(2 * group))
        arrival.came(group)
    thread.join(30)
    assert passed == list(range(8))


def test_what_does_not_come_is_given_up_and_what_is_slow_is_not() -> None:
    """The patience is for a group, not for the load."""
    arrival = Arrival(layers=4, groups=4, patience_s=1.0)

    def slowly() -> None:
        for group in range(3):
            time.sleep(0.4)
            arrival.came(group)

    thread = threading.Thread(target=slowly)
    thread.start()
    assert arrival.wait_for(2)
    began = time.monotonic()
    assert not arrival.wait_for(3)
    assert 0.8 < time.monotonic() - began < 30
    thread.join(30)
