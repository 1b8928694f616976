"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_count,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    write_duration,
    write_size,
)


@pytest.mark.parametrize(
    "text,size_bytes",
    [
        ("8GiB", 8 * GIB),
        ("512MiB", 512 * MIB),
        ("512 mib", 512 * MIB),
        ("512Mi", 512 * MIB),
        ("100G", 100 * 10**9),
        ("100GB", 100 * 10**9),
        ("1.5TiB", TIB + TIB // 2),
        ("4096", 4096),
        ("4096B", 4096),
        ("1_000k", 10**6),
        (".5KiB", 512),
        ("0", 0),
        ("7EiB", None),
        ("9000PiB", None),
        ("0.3B", None),
        ("-1GiB", None),
        ("GiB", None),
        ("8 Gi B", None),
        ("", None),
        ("nan", None),
        ("1e9", None),
    ],
)
def test_parse_size(text: str, size_bytes: int | None) -> None:
    if size_bytes is not None:
        assert parse_size(text) == size_bytes
        return
    with pytest.raises(InvalidArgument) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_size_is_exact() -> None:
    """Elsewhere sizes went through a float, and the capacity of a large disk came out a few bytes off."""
    assert parse_size("4.5TiB") == 4 * TIB + TIB // 2
    assert parse_size(str(2**62 + 1)) == 2**62 + 1


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_write_size_reads_back(size_bytes: int) -> None:
    assert parse_size(write_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    "size_bytes,text",
    [
        (0, "0B"),
        (1, "1B"),
        (4 * KIB, "4KiB"),
        (3 * GIB // 2, "1.5GiB"),
        (10**11, "93.13GiB"),
        (-2 * MIB, "-2MiB"),
    ],
)
def test_format_size(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    "size_bytes,text",
    [(8 * GIB, "8GiB"), (3 * TIB // 2, "1.5TiB"), (10**11, "100GB"), (10**6 + 1, "1000001")],
)
def test_write_size(size_bytes: int, text: str) -> None:
    assert write_size(size_bytes) == text


@pytest.mark.parametrize(
    "text,duration_s",
    [
        ("120s", 120.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        ("30", 30.0),
        ("250us", 250e-6),
        ("1d", 86400.0),
    ],
)
def test_parse_duration(text: str, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["", "s", "5 weeks", "-1s", "1m30s"])
def test_parse_duration_refuses(text: str) -> None:
    with pytest.raises(InvalidArgument, match="120s, 500ms or 2m"):
        parse_duration(text)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_write_duration_reads_back(duration_s: float) -> None:
    assert parse_duration(write_duration(duration_s)) == duration_s


@pytest.mark.parametrize(
    "duration_s,text",
    [
        (0.0, "0s"),
        (350e-6, "350µs"),
        (0.0125, "12.5ms"),
        (2.0, "2s"),
        (120.0, "2m"),
        (5400.0, "1.5h"),
        (-2.0, "-2s"),
    ],
)
def test_format_duration(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


def test_format_count() -> None:
    assert format_count(1 << 20) == "1,048,576"
