"""The identity of a block.

The vectors below are worked out with hashlib alone, by the three lines of docs/protocol.md:

    digest = blake2b("kvstore.namespace.1" ‖ for each tag, sorted: len(tag) u32, len(value) u32, tag, value; 32 bytes)
    key    = blake2b(digest; 32 bytes; key = secret)
    hash_i = blake2b(hash_{i-1} ‖ tokens of block i as u32; 16 bytes; key = key)
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.identity import (
    OPTIONAL_PARTS,
    REQUIRED_PARTS,
    HashChain,
    hash_blocks,
    namespace_digest,
    namespace_key,
)

PARTS = {"model": b"m", "weights": b"w", "dtype": b"float32", "block_tokens": b"4", "groups": b"g"}
KEY = bytes(range(32))
ROOT = bytes(16)
TOKENS = st.lists(st.integers(0, 0xFFFFFFFF), max_size=80)


def chain_of(parts: dict[str, bytes], tokens: list[int], block_tokens: int = 4) -> bytes:
    """The hashes of a prompt in a namespace, packed."""
    key = namespace_key(namespace_digest(parts), b"secret")
    return hash_blocks(key, ROOT, tokens, block_tokens).tobytes()


def test_vectors_of_the_protocol() -> None:
    digest = namespace_digest(PARTS)
    key = namespace_key(digest, b"secret")
    assert digest.hex() == "07fb63eac28f46ce8187cdf0821cf8ba0f0d6176c2048387f5c63f871f566032"
    assert key.hex() == "a9877c4d3cb99f4edebb1e9997d43cf98c67943a2f663e1761b689204af1baaf"
    hashes = hash_blocks(key, ROOT, list(range(10)), 4)
    assert hashes.shape == (2, 2)
    assert hashes.dtype == np.dtype("<u8")
    assert hashes[0].tobytes().hex() == "41055372f3b55b4cc67972e8be3d1e24"
    assert hashes[1].tobytes().hex() == "15c7abf6e2158360b584a79e9650dea4"


@given(
    optional=st.dictionaries(st.sampled_from(OPTIONAL_PARTS), st.binary(max_size=20)),
    secret=st.binary(min_size=1, max_size=64),
    tokens=TOKENS,
    block_tokens=st.integers(1, 9),
)
def test_equals_a_plain_reading_of_the_document(
    optional: dict[str, bytes], secret: bytes, tokens: list[int], block_tokens: int
) -> None:
    parts = PARTS | optional
    text = b"kvstore.namespace.1"
    for tag in sorted(parts):
        text += struct.pack("<II", len(tag), len(parts[tag])) + tag.encode() + parts[tag]
    digest = hashlib.blake2b(text, digest_size=32).digest()
    assert namespace_digest(parts) == digest
    key = hashlib.blake2b(digest, digest_size=32, key=secret).digest()
    assert namespace_key(digest, secret) == key
    previous, expected = ROOT, b""
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        previous = hashlib.blake2b(previous + block, digest_size=16, key=key).digest()
        expected += previous
    assert hash_blocks(key, ROOT, tokens, block_tokens).tobytes() == expected


@pytest.mark.parametrize("tag", sorted({*REQUIRED_PARTS, *OPTIONAL_PARTS}))
def test_same_tokens_under_another_part_are_other_blocks(tag: str) -> None:
    """Caches elsewhere served the KV of one model, dtype, LoRA or salt for another's with the same tokens."""
    tokens = list(range(8))
    plain = chain_of(PARTS, tokens)
    other = chain_of(PARTS | {tag: b"other"}, tokens)
    third = chain_of(PARTS | {tag: b"third"}, tokens)
    assert len({plain, other, third}) == 3
    assert not {plain[i : i + 16] for i in (0, 16)} & {other[i : i + 16] for i in (0, 16)}


def test_another_block_size_gives_other_blocks() -> None:
    """Two engines with other block sizes must not meet, even where the namespace did not say so."""
    tokens = list(range(16))
    small = hash_blocks(KEY, ROOT, tokens, 4)
    large = hash_blocks(KEY, ROOT, tokens, 8)
    assert not {h.tobytes() for h in small} & {h.tobytes() for h in large}


def test_another_tenant_gives_other_blocks() -> None:
    """Shared prefix caches leak prompts by timing: the secret keeps tenants apart."""
    digest = namespace_digest(PARTS)
    assert namespace_key(digest, b"a") != namespace_key(digest, b"b")


@pytest.mark.parametrize(
    "left,right",
    [
        ({"salt": b"bc"}, {"salt": b"b", "sharding": b"c"}),
        ({"adapter": b"ab", "codec": b"c"}, {"adapter": b"a", "codec": b"bc"}),
        ({"adapter": b"", "codec": b"abc"}, {"adapter": b"abc", "codec": b""}),
        ({"rope": b""}, {}),
        ({"adapter": b"a" + struct.pack("<II", 5, 1) + b"codec" + b"x"}, {"adapter": b"a", "codec": b"x"}),
    ],
)
def test_the_boundary_between_parts_cannot_be_moved(left: dict[str, bytes], right: dict[str, bytes]) -> None:
    """Joined without lengths, {"a": "bc"} and {"ab": "c"} were one key elsewhere."""
    assert namespace_digest(PARTS | left) != namespace_digest(PARTS | right)


@given(
    st.dictionaries(st.sampled_from(OPTIONAL_PARTS), st.binary(max_size=6)),
    st.dictionaries(st.sampled_from(OPTIONAL_PARTS), st.binary(max_size=6)),
)
def test_digests_are_equal_exactly_where_parts_are(left: dict[str, bytes], right: dict[str, bytes]) -> None:
    assert (namespace_digest(PARTS | left) == namespace_digest(right | PARTS)) == (left == right)


@pytest.mark.parametrize("tag", REQUIRED_PARTS)
def test_a_required_part_may_be_neither_missing_nor_empty(tag: str) -> None:
    with pytest.raises(InvalidArgument, match=tag):
        namespace_digest({name: value for name, value in PARTS.items() if name != tag})
    with pytest.raises(InvalidArgument, match=tag):
        namespace_digest(PARTS | {tag: b""})


def test_unknown_and_oversized_parts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'lora'"):
        namespace_digest(PARTS | {"lora": b"x"})
    with pytest.raises(InvalidArgument, match="digest"):
        namespace_digest(PARTS | {"salt": bytes(4097)})


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 80), max_size=6), block_tokens=st.integers(1, 9))
def test_a_chain_that_grows_equals_one_made_at_once(
    tokens: list[int], cuts: list[int], block_tokens: int
) -> None:
    chain = HashChain(KEY, block_tokens)
    at = 0
    for cut in sorted(cuts):
        seen = chain.hashes
        before = seen.copy()
        chain.extend(tokens[at:cut])
        at = max(at, min(cut, len(tokens)))
        assert (seen == before).all()
    chain.extend(np.array(tokens[at:], dtype=np.int64))
    assert chain.hashes.tobytes() == hash_blocks(KEY, ROOT, tokens, block_tokens).tobytes()
    assert len(chain) == len(tokens) // block_tokens
    assert chain.num_tokens == len(tokens)


@given(tokens=st.lists(st.integers(0, 0xFFFFFFFF), min_size=8, max_size=40), data=st.data())
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens]
    changed[at] ^= 1
    same = (hash_blocks(KEY, ROOT, tokens, 4) == hash_blocks(KEY, ROOT, changed, 4)).all(axis=1)
    assert same.tolist() == [True] * (at // 4) + [False] * (len(tokens) // 4 - at // 4)


@pytest.mark.parametrize("count,blocks", [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_a_hash(count: int, blocks: int) -> None:
    """A prompt shorter than a block, and one of exactly k blocks, were off by one elsewhere."""
    assert hash_blocks(KEY, ROOT, list(range(count)), 4).shape == (blocks, 2)


@pytest.mark.parametrize(
    "tokens", [[-1, 0], [1 << 32, 0], np.array([-1, 0]), np.array([1 << 32, 0]), [0.5, 1.0], [True, False]]
)
def test_tokens_that_a_cast_would_change_are_refused(tokens: object) -> None:
    """Cast to 32 bits, token 2**32 would be token 0 and token 0.5 too: two prompts, one block."""
    with pytest.raises(InvalidArgument, match="token ids"):
        hash_blocks(KEY, ROOT, tokens, 2)
    with pytest.raises(InvalidArgument, match="token ids"):
        HashChain(KEY, 2).extend(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", "<u2", "u1"])
def test_any_integer_array_will_do(dtype: str) -> None:
    expected = hash_blocks(KEY, ROOT, [1, 2, 3, 4], 2)
    assert (hash_blocks(KEY, ROOT, np.array([1, 2, 3, 4], dtype=dtype), 2) == expected).all()
    strided = np.array([1, 9, 2, 9, 3, 9, 4, 9], dtype=dtype)[::2]
    assert (hash_blocks(KEY, ROOT, strided, 2) == expected).all()


def test_malformed_calls_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="parent"):
        hash_blocks(KEY, b"short", [1, 2], 2)
    with pytest.raises(InvalidArgument, match="at least one token"):
        hash_blocks(KEY, ROOT, [1, 2], 0)
    with pytest.raises(InvalidArgument, match="32 bytes"):
        HashChain(b"short", 2)


def test_a_caller_cannot_change_a_chain_by_its_hashes() -> None:
    chain = HashChain(KEY, 2, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="read-only"):
        chain.hashes[0] = 0
