"""The shape of a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.geometry import DTYPE_BYTES, SLOT_ALIGN_BYTES, Geometry, HitRule, LayerGroup, opaque_geometry

SMOLLM2 = LayerGroup(layers=30, kv_heads=3, head_dim=64, block_tokens=32)


def test_the_real_model() -> None:
    """SmolLM2-135M in float32 stores 46,080 bytes a token."""
    geometry = Geometry(groups=(SMOLLM2,), dtype="float32")
    assert geometry.payload_bytes == 32 * 46_080
    assert geometry.slot_bytes == 1_474_560
    assert geometry.block_tokens == 32


@given(
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    block_tokens=st.integers(1, 64),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_a_slot_is_the_payload_rounded_up_to_whole_pages(
    layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: str
) -> None:
    group = LayerGroup(layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens)
    geometry = Geometry(groups=(group,), dtype=dtype)
    assert geometry.payload_bytes == 2 * layers * kv_heads * head_dim * block_tokens * DTYPE_BYTES[dtype]
    assert geometry.slot_bytes % SLOT_ALIGN_BYTES == 0
    assert 0 <= geometry.slot_bytes - geometry.payload_bytes < SLOT_ALIGN_BYTES


@pytest.mark.parametrize("rule", [HitRule.TRAILING, HitRule.CHECKPOINT])
def test_rules_that_are_not_built_are_refused(rule: HitRule) -> None:
    with pytest.raises(InvalidArgument, match=rule.name):
        LayerGroup(layers=1, kv_heads=1, head_dim=1, block_tokens=1, rule=rule, window_tokens=64)


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, (1 << 20) + 1])
def test_counts_out_of_range_are_refused(name: str, value: int) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1, name: value}
    with pytest.raises(InvalidArgument, match=name):
        LayerGroup(**sizes)


@pytest.mark.parametrize("dtype", ["", "int4", "Float32"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match="not known"):
        Geometry(groups=(SMOLLM2,), dtype=dtype)


@pytest.mark.parametrize("groups", [(), (SMOLLM2, SMOLLM2)])
def test_other_than_one_group_is_refused(groups: tuple[LayerGroup, ...]) -> None:
    with pytest.raises(InvalidArgument, match="one layer group"):
        Geometry(groups=groups, dtype="float32")


def test_a_block_over_the_limit_is_refused() -> None:
    huge = LayerGroup(layers=1024, kv_heads=128, head_dim=1024, block_tokens=1024)
    with pytest.raises(InvalidArgument, match="too large"):
        Geometry(groups=(huge,), dtype="float8_e4m3fn")


@pytest.mark.parametrize("nbytes,slot_bytes", [(1, 4096), (4096, 4096), (4097, 8192), (5 << 20, 5 << 20)])
def test_bytes_alone_have_a_geometry_too(nbytes: int, slot_bytes: int) -> None:
    assert opaque_geometry(nbytes).slot_bytes == slot_bytes


def test_no_bytes_have_none() -> None:
    with pytest.raises(InvalidArgument, match="layers"):
        opaque_geometry(0)
