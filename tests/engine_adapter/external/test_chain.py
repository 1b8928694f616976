"""Hashes of requests: text as everywhere, and images by what they are and where they stand."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from engine_adapter.external.chain import Item, RequestChain
from kvstore.client import Namespace

KEY = bytes(range(32))
BLOCK = 4
TOKENS = list(range(100, 126))  # six blocks and two tokens


def namespace() -> Namespace:
    return Namespace({}, BLOCK, 1, KEY)


def hashes(*items: Item, tokens: list[int] | None = None) -> list[bytes]:
    chain = RequestChain(namespace(), TOKENS if tokens is None else tokens, items)
    return [block.tobytes() for block in chain.hashes]


def test_text_is_hashed_as_everywhere() -> None:
    assert hashes() == [block.tobytes() for block in namespace().chain(TOKENS).hashes]


def test_an_image_changes_its_blocks_and_those_behind() -> None:
    plain, one = hashes(), hashes(Item(identifier="cat", offset=5, length=6))
    assert one[:1] == plain[:1]
    assert not set(one[1:]) & set(plain[1:])


@pytest.mark.parametrize(
    "other",
    [
        Item(identifier="dog", offset=5, length=6),
        Item(identifier="cat", offset=6, length=5),
        Item(identifier="cat", offset=5, length=8),
    ],
)
def test_another_image_or_another_place_is_another_block(other: Item) -> None:
    """One that only reaches further changes the block it reaches into: the digest is in each block that it touches."""
    one, two = hashes(Item(identifier="cat", offset=5, length=6)), hashes(other)
    first = 3 if other.identifier == "cat" and other.offset == 5 else 1
    assert one[:first] == two[:first]
    assert not set(one[first:]) & set(two[first:])


def test_the_order_of_two_images_matters() -> None:
    cat, dog = "cat", "dog"
    one = hashes(Item(identifier=cat, offset=4, length=2), Item(identifier=dog, offset=6, length=2))
    two = hashes(Item(identifier=dog, offset=4, length=2), Item(identifier=cat, offset=6, length=2))
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_growing_is_the_same_as_all_at_once() -> None:
    items = (Item(identifier="cat", offset=5, length=6), Item(identifier="dog", offset=9, length=3))
    for cut in range(len(TOKENS) + 1):
        chain = RequestChain(namespace(), TOKENS[:cut], items)
        chain.extend(TOKENS[chain.num_tokens :])
        assert [block.tobytes() for block in chain.hashes] == hashes(*items)
        plain = RequestChain(namespace(), TOKENS[:cut])
        plain.extend(TOKENS[plain.num_tokens :])
        assert np.array_equal(plain.hashes, namespace().chain(TOKENS).hashes)


def test_the_documented_form() -> None:
    """docs/protocol.md says what is hashed."""
    digest = hashlib.blake2b(b"cat", digest_size=16).digest()
    first = hashlib.blake2b(
        bytes(16) + struct.pack("<4I", *TOKENS[:4]) + digest + struct.pack("<q", 2), digest_size=16, key=KEY
    ).digest()
    second = hashlib.blake2b(
        first + struct.pack("<4I", *TOKENS[4:8]) + digest + struct.pack("<q", -2), digest_size=16, key=KEY
    ).digest()
    third = hashlib.blake2b(second + struct.pack("<4I", *TOKENS[8:12]), digest_size=16, key=KEY).digest()
    assert hashes(Item(identifier="cat", offset=2, length=4))[:3] == [first, second, third]
