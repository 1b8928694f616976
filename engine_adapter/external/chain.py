"""The hash chain of a request, also where images and the like stand in for tokens.

    hash_i = BLAKE2b-128 keyed with the namespace's key over
             hash_{i-1} ‖ tokens of block i ‖ digest_1 ‖ offset_1 ‖ digest_2 ‖ …

with one pair for each item that has a token in the block, in their order: BLAKE2b-128 of the item's identifier, and
where it begins relative to the block, a signed 64-bit number. A block without any is hashed as text is
(kvstore/identity.py), so that what follows an image in one prompt and text in another never meets, and text alone is
one chain for all engines.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Namespace
from kvstore.hash_chain import HASH_BYTES
from kvstore.identity import HashChain, hash_blocks, packed_tokens

__all__ = ["Item", "RequestChain"]

_OFFSET = struct.Struct("<q")
_ROOT = bytes(HASH_BYTES)
_NO_HASHES: NDArray[np.uint64] = np.empty((0, 2), dtype="<u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that is no text, at a place in the prompt: `length` tokens from `offset` on stand for it."""

    identifier: str
    offset: int
    length: int


class RequestChain:
    """The hashes of one growing request. One thread."""

    __slots__ = ("_chain", "_first_plain", "_hashes", "_items", "_key", "_namespace", "block_tokens")

    def __init__(self, namespace: Namespace, token_ids: Sequence[int], items: Sequence[Item] = ()) -> None:
        """`token_ids`: what is confirmed so far. O(tokens)."""
        self.block_tokens = namespace.block_tokens
        self._namespace = namespace
        self._key = namespace.key
        self._items = tuple(sorted(items, key=lambda item: item.offset))
        self._chain: HashChain | None = None
        self._hashes = _NO_HASHES
        if self._items:
            # Blocks from here on have no item, and are hashed as text behind the last that has one.
            end = max(item.offset + item.length for item in self._items)
            self._first_plain = -(-end // self.block_tokens)
            self.extend(token_ids)
        else:
            self._first_plain = 0
            self._chain = namespace.chain(token_ids)

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """[full blocks, 2]."""
        return self._hashes if self._chain is None else self._chain.hashes

    @property
    def current(self) -> bool:
        """False: all that the store had was lost and the namespace has another key, under which nobody knows these."""
        return self._key == self._namespace.key

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be given again."""
        return len(self._hashes) * self.block_tokens if self._chain is None else self._chain.num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the tokens that follow the first `num_tokens`."""
        if self._chain is not None:
            self._chain.extend(token_ids)
            return
        tokens = packed_tokens(token_ids)
        first = len(self._hashes)
        count = len(tokens) // self.block_tokens
        with_items = max(0, min(count, self._first_plain - first))
        found = [self._hashes]
        parent = self._hashes[-1].tobytes() if first else _ROOT
        for block in range(with_items):
            begin = block * self.block_tokens
            parent = self._hash(parent, first + block, tokens[begin : begin + self.block_tokens])
            found.append(np.frombuffer(parent, dtype="<u8").reshape(1, 2))
        rest = tokens[with_items * self.block_tokens : count * self.block_tokens]
        found.append(hash_blocks(self._key, parent, rest, self.block_tokens))
        self._hashes = np.concatenate(found)

    def _hash(self, parent: bytes, block: int, tokens: NDArray[np.uint32]) -> bytes:
        begin, end = block * self.block_tokens, (block + 1) * self.block_tokens
        state = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=self._key)
        state.update(tokens.tobytes())
        for item in self._items:
            if item.offset < end and item.offset + item.length > begin:
                state.update(hashlib.blake2b(item.identifier.encode(), digest_size=HASH_BYTES).digest())
                state.update(_OFFSET.pack(item.offset - begin))
        return state.digest()
