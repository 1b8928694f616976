"""A block's identity: the namespace (all that makes KV interchangeable) and the keyed hash chain inside it.

    digest = BLAKE2b-256 of the tagged, length-prefixed parts, sorted by tag
    key    = BLAKE2b-256 keyed with the tenant's secret over the digest (the daemon does this)
    hash_i = BLAKE2b-128 keyed with `key` over  hash_{i-1} (16 zero bytes for i = 0) ‖ tokens of block i, uint32 LE

A keyed hash of 128 bits: without the key nobody can find collisions or test whether a prompt is cached (vLLM
CVE-2025-25183; NDSS'25 prompt leakage through shared caches). Hashing is the one thing done per block: 0.35 µs for 32
tokens, 0.7-1.6 µs where the compiled helper is absent. Test vectors: docs/protocol.md. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.errors import InvalidArgument
from kvstore.hash_chain import HASH_BYTES, hash_chain

__all__ = [
    "KEY_BYTES",
    "OPTIONAL_PARTS",
    "REQUIRED_PARTS",
    "HashChain",
    "hash_blocks",
    "namespace_digest",
    "namespace_key",
    "packed_tokens",
]

KEY_BYTES = 32
_ROOT = bytes(HASH_BYTES)
_NO_HASHES: NDArray[np.uint64] = np.empty((0, 2), dtype="<u8")
_MAX_PART_BYTES = 4096
_MAX_TOKEN = 0xFFFFFFFF
_NO_TOKEN = f"token ids are integers between 0 and {_MAX_TOKEN}"

REQUIRED_PARTS = ("model", "weights", "dtype", "block_tokens", "groups")
"""Tags that every namespace states: model id; fingerprint of the weights (revision, sizes, sampled digest); element
type of the KV; tokens a block; layer groups and head shapes."""
OPTIONAL_PARTS = (
    "adapter",
    "architecture",
    "codec",
    "epoch",
    "quantization",
    "rope",
    "salt",
    "sharding",
    "tenant",
)
"""Tags that may be stated; an absent part and an empty part are different namespaces."""


def namespace_digest(parts: Mapping[str, bytes]) -> bytes:
    """32 bytes that are equal only when every part is. O(total bytes).

    Raises: InvalidArgument for an unknown tag, a missing required one, or a part over 4 KiB.
    """
    known = {*REQUIRED_PARTS, *OPTIONAL_PARTS}
    unknown = sorted(set(parts) - known)
    if unknown:
        raise InvalidArgument(f"unknown namespace part {unknown[0]!r}: use one of {', '.join(sorted(known))}")
    missing = [tag for tag in REQUIRED_PARTS if not parts.get(tag)]
    if missing:
        raise InvalidArgument(
            f"the namespace lacks its part {missing[0]!r}: without it two models could be taken for one"
        )
    state = hashlib.blake2b(b"kvstore.namespace.1", digest_size=KEY_BYTES)
    for tag in sorted(parts):
        value = parts[tag]
        if len(value) > _MAX_PART_BYTES:
            raise InvalidArgument(
                f"namespace part {tag!r} is {len(value)} bytes: at most {_MAX_PART_BYTES}; send a digest"
            )
        name = tag.encode()
        state.update(struct.pack("<II", len(name), len(value)) + name + value)
    return state.digest()


def namespace_key(digest: bytes, secret: bytes) -> bytes:
    """Key of the hash chain: the namespace under the tenant's secret (1 to 64 bytes)."""
    return hashlib.blake2b(digest, digest_size=KEY_BYTES, key=secret).digest()


def hash_blocks(key: bytes, parent: bytes, token_ids: ArrayLike, block_tokens: int) -> NDArray[np.uint64]:
    """Hashes of the full blocks of `token_ids` that follow `parent` (16 bytes; zeros at the root): [n, 2].

    O(tokens): 1.4 ms for 131,072 where the helper is compiled, else one Python step a block (kvstore/hash_chain.py). A
    last block that is not full has no hash.

    Raises: InvalidArgument for a parent that is not 16 bytes, no tokens a block, or a token id that is no uint32.
    """
    if len(parent) != HASH_BYTES or block_tokens < 1:
        raise InvalidArgument(f"a parent hash has {HASH_BYTES} bytes and a block at least one token")
    packed = hash_chain(key, parent, packed_tokens(token_ids).data, 4 * block_tokens)
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 2)


def packed_tokens(token_ids: ArrayLike) -> NDArray[np.uint32]:
    """[n] tokens as little-endian uint32, contiguous. Casting alone would wrap: token 2**32 would be taken for token 0.

    Raises: InvalidArgument for what is no uint32. O(n): 131,072 of a list in 0.8 ms, an array at best as it is.
    """
    if isinstance(token_ids, list | tuple) and token_ids and type(token_ids[0]) is int:
        return _packed(token_ids)
    given = np.asarray(token_ids)
    if given.size and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() > _MAX_TOKEN):
        raise InvalidArgument(_NO_TOKEN)
    return np.ascontiguousarray(given, dtype="<u4").reshape(-1)


def _packed(token_ids: Sequence[int]) -> NDArray[np.uint32]:
    """A list's tokens: an `array` refuses what is no uint32 while it converts, in a quarter of numpy's time."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(_NO_TOKEN) from error
    return np.frombuffer(packed, dtype=np.uint32).astype("<u4", copy=False)


class HashChain:
    """The hashes of one growing conversation; each block is hashed once.

    Not thread-safe. `extend` takes tokens as they come; only full blocks appear in `hashes`.
    """

    __slots__ = ("_buffer", "_count", "_key", "_rest", "block_tokens")

    def __init__(
        self,
        key: bytes,
        block_tokens: int,
        token_ids: Sequence[int] | NDArray[np.integer] = (),
        *,
        known: NDArray[np.uint64] | None = None,
    ) -> None:
        """`known`: hashes of the first blocks of `token_ids`, [blocks, 2], which are then not computed."""
        if len(key) != KEY_BYTES:
            raise InvalidArgument(f"the key of a hash chain is {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self.block_tokens = block_tokens
        self._count = 0 if known is None else len(known)
        self._buffer = np.empty((max(16, len(token_ids) // block_tokens + 1), 2), dtype="<u8")
        self._buffer[: self._count] = _NO_HASHES if known is None else known
        self._rest = np.empty(0, dtype="<u4")
        self.extend(token_ids[self._count * block_tokens :] if self._count else token_ids)

    def extend(self, token_ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Appends tokens. O(new tokens), amortised."""
        tokens = packed_tokens(token_ids)
        if len(self._rest):
            tokens = np.concatenate([self._rest, tokens])
        parent = self._buffer[self._count - 1].tobytes() if self._count else _ROOT
        new = hash_blocks(self._key, parent, tokens, self.block_tokens)
        needed = self._count + len(new)
        if needed > len(self._buffer):
            grown = np.empty((max(needed, 2 * len(self._buffer)), 2), dtype="<u8")
            grown[: self._count] = self._buffer[: self._count]
            self._buffer = grown
        self._buffer[self._count : needed] = new
        self._count = needed
        self._rest = tokens[len(new) * self.block_tokens :]

    def __len__(self) -> int:
        return self._count

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """[blocks, 2], a read-only view that later extensions do not change."""
        view = self._buffer[: self._count]
        view.flags.writeable = False
        return view

    @property
    def num_tokens(self) -> int:
        """Tokens seen, those of the last, unfinished block included."""
        return self._count * self.block_tokens + len(self._rest)
