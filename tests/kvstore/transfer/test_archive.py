"""The format of an export: what is packed is read back, and every damage is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corruption
from kvstore.transfer.archive import (
    END_BYTES,
    HEAD_BYTES,
    PREFIX_BYTES,
    BlockHead,
    Header,
    RunningDigest,
    pack_end,
    pack_head,
    pack_header,
    payload_checksum,
    read_end,
    read_head,
    read_header,
    rest_of_header,
)

PARTS = {"model": b"m", "weights": b"\xff\x00", "dtype": b"float32", "block_tokens": b"4", "groups": b"1x1x1"}
HEADER = Header(parts=PARTS, key=b"k" * 32, slot_bytes=8192, planned_blocks=7, created_ms=1_700_000_000_000)
HEAD = BlockHead(
    hash=b"h" * 16, parent=b"p" * 16, depth=3, touch=1 << 60, checksum=payload_checksum(b"payload")
)


def test_what_is_packed_is_read_back() -> None:
    packed = pack_header(HEADER)
    assert PREFIX_BYTES + rest_of_header(packed[:PREFIX_BYTES]) == len(packed)
    assert read_header(packed) == HEADER
    assert len(pack_head(HEAD)) == HEAD_BYTES
    assert read_head(pack_head(HEAD)) == HEAD
    digest = RunningDigest()
    digest.add(pack_head(HEAD))
    end = digest.end()
    assert (end.blocks, len(pack_end(end))) == (1, END_BYTES)
    assert read_end(pack_end(end)) == end


def test_the_digest_depends_on_the_order() -> None:
    one, two = RunningDigest(), RunningDigest()
    for head in (b"a", b"b"):
        one.add(head)
    for head in (b"b", b"a"):
        two.add(head)
    assert one.end() != two.end()


def opened(packed: bytes) -> Header:
    """As a reader does it."""
    rest_of_header(packed[:PREFIX_BYTES])
    return read_header(packed)


@given(at=st.integers(min_value=0), flip=st.integers(1, 255))
def test_every_flipped_byte_is_seen(at: int, flip: int) -> None:
    for packed, read in ((pack_head(HEAD), read_head), (pack_end(RunningDigest().end()), read_end)):
        damaged = bytearray(packed)
        damaged[at % len(packed)] ^= flip
        assert read(bytes(damaged)) is None
    header = bytearray(pack_header(HEADER))
    header[at % len(header)] ^= flip
    with pytest.raises(Corruption):
        opened(bytes(header))


@given(junk=st.binary(max_size=300))
def test_junk_is_refused_and_never_believed(junk: bytes) -> None:
    with pytest.raises(Corruption):
        rest_of_header(junk)
    with pytest.raises(Corruption):
        read_header(junk)
    assert read_end(junk) is None
    if len(junk) >= HEAD_BYTES:
        assert read_head(junk) is None


def test_another_format_is_refused_by_its_number() -> None:
    packed = bytearray(pack_header(HEADER))
    packed[8] = 9
    with pytest.raises(Corruption, match="format 9"):
        rest_of_header(bytes(packed[:PREFIX_BYTES]))


@pytest.mark.parametrize(
    "change",
    [
        {"slot_bytes": 0},
        {"slot_bytes": 4097},
        {"slot_bytes": 2 << 30},
        {"key": b"short"},
        {"planned_blocks": -1},
        {"parts": {}},
        {"parts": {**PARTS, "colour": b"x"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_header_without_sense_is_refused(change: dict[str, object]) -> None:
    """Its checksum is right: whoever wrote it is wrong."""
    fields = {name: getattr(HEADER, name) for name in Header.__slots__} | change
    with pytest.raises(Corruption):
        read_header(pack_header(Header(**fields)))  # type: ignore[arg-type]
