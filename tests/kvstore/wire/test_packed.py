"""Packed records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.wire.packed import COPY, MOVE, REPLY, SEAL, hashes_of, records_of, u8_of, u32_of, u64_of

RECORDS = {"SEAL": (SEAL, 48), "COPY": (COPY, 16), "MOVE": (MOVE, 120), "REPLY": (REPLY, 32)}


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_sizes_that_the_protocol_states(name: str) -> None:
    dtype, nbytes = RECORDS[name]
    assert dtype.itemsize == nbytes
    assert dtype.fields is not None
    covered = sorted((offset, field.itemsize) for field, offset, *_ in dtype.fields.values())
    assert sum(size for _, size in covered) == nbytes  # no hidden padding that would differ between compilers
    assert all(offset % min(size, 8) == 0 for offset, size in covered)


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_little_endian(name: str) -> None:
    dtype, _ = RECORDS[name]
    for field in dtype.names or ():
        assert dtype[field].base.newbyteorder("<") == dtype[field].base


def test_a_seal_byte_by_byte() -> None:
    packed = b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4)) + bytes(range(32))
    (seal,) = records_of(packed, SEAL)
    assert [int(seal[field]) for field in ("slot", "generation", "namespace", "depth")] == [1, 2, 3, 4]
    assert seal["hash"].tobytes() == bytes(range(16))
    assert seal["parent"].tobytes() == bytes(range(16, 32))


def test_a_copy_byte_by_byte() -> None:
    (copy,) = records_of(b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4)), COPY)
    assert copy.tolist() == (1, 2, 3, 4)


@pytest.mark.parametrize("name", RECORDS)
@given(data=st.data())
def test_records_round_trip(name: str, data: st.DataObject) -> None:
    dtype, nbytes = RECORDS[name]
    packed = data.draw(st.binary(max_size=4 * nbytes).map(lambda b: b[: len(b) // nbytes * nbytes]))
    records = records_of(packed, dtype)
    assert len(records) == len(packed) // nbytes
    assert records.tobytes() == packed


@given(st.binary(max_size=70))
def test_a_length_that_is_no_whole_number_of_elements_is_refused(packed: bytes) -> None:
    """A client's arrays are not trusted: a short one must not be read as fewer or other elements."""
    for parse, size in ((hashes_of, 16), (u32_of, 4), (u64_of, 8), (lambda b: records_of(b, SEAL), 48)):
        if len(packed) % size:
            with pytest.raises(InvalidArgument):
                parse(packed)
        else:
            assert parse(packed).tobytes() == packed
    assert u8_of(packed).tobytes() == packed


def test_parsed_arrays_cannot_be_changed() -> None:
    assert not hashes_of(bytes(16)).flags.writeable
    assert not u32_of(bytes(4)).flags.writeable


def test_hashes_keep_their_byte_order() -> None:
    hashes = hashes_of(bytes(range(32)))
    assert hashes.shape == (2, 2)
    assert hashes[1].tobytes() == bytes(range(16, 32))
    assert hashes.dtype == np.dtype("<u8")
