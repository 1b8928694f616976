"""A namespace as a session has opened it: what names blocks in it, and the chains that were hashed there lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.client.known_chains import KnownChains
from kvstore.identity import HashChain, packed_tokens

__all__ = ["Namespace"]


class Namespace:
    """All that makes KV interchangeable, opened in one session; handle and key may change when a session is renewed."""

    __slots__ = ("_known", "block_tokens", "handle", "key", "parts")

    def __init__(self, parts: Mapping[str, bytes], block_tokens: int, handle: int, key: bytes) -> None:
        self.parts = dict(parts)
        self.block_tokens = block_tokens
        self.handle = handle
        self.key = key
        self._known = KnownChains(block_tokens)

    def reopened(self, handle: int, key: bytes) -> None:
        """What the daemon calls it now. Another key: all was lost, the tenant's secret too; chains begin anew."""
        self.handle = handle
        if key != self.key:
            self.key = key
            self._known = KnownChains(self.block_tokens)

    def chain(self, token_ids: Sequence[int] | NDArray[np.integer] = ()) -> HashChain:
        """The hash chain of a prompt in this namespace; it can be extended. What a recent one had too is not hashed."""
        tokens = packed_tokens(token_ids)
        chain = HashChain(self.key, self.block_tokens, tokens, known=self._known.prefix(tokens))
        self._known.remember(tokens.copy() if isinstance(token_ids, np.ndarray) else tokens, chain.hashes)
        return chain
