"""Prompts that were hashed lately, so that one that continues another is hashed only from where they part.

A conversation's next turn repeats all of its past; comparing it with that past is twenty times as fast as hashing it
again. Bounded: the least recently used prompts go first. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KnownChains"]

_NO_HASHES: NDArray[np.uint64] = np.empty((0, 2), dtype=np.uint64)
_MAX_TOKENS = 4 << 20
_MAX_BRANCHES = (
    8  # prompts with one first block that are compared; a system prompt is the first block of many
)


@dataclass(frozen=True, slots=True)
class _Known:
    tokens: NDArray[np.uint32]
    hashes: NDArray[np.uint64]


class KnownChains:
    """Of one key and block size."""

    def __init__(self, block_tokens: int, *, max_tokens: int = _MAX_TOKENS) -> None:
        """`max_tokens`: of all prompts that are kept together; 4 bytes each, and 16 a block."""
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._branches: OrderedDict[bytes, list[_Known]] = OrderedDict()  # by the tokens of the first block
        self._tokens = 0

    def prefix(self, tokens: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """[blocks, 2] hashes of the longest run of whole leading blocks that is known. O(n) a branch."""
        with self._lock:
            branch = self._branches.get(self._first(tokens))
            if branch is None:
                return _NO_HASHES
            blocks = [self._common_blocks(known, tokens) for known in branch]
            longest = max(blocks)
            return branch[blocks.index(longest)].hashes[:longest]

    def remember(self, tokens: NDArray[np.uint32], hashes: NDArray[np.uint64]) -> None:
        """A prompt and the hashes of its whole blocks; neither may be changed afterwards."""
        if not len(hashes) or len(tokens) > self._max_tokens:
            return
        first = self._first(tokens)
        with self._lock:
            branch = self._branches.setdefault(first, [])
            self._branches.move_to_end(first)
            # One that this one continues will not be needed again.
            whole = [known for known in branch if self._common_blocks(known, tokens) == len(known.hashes)]
            for known in whole or branch[: max(0, len(branch) - _MAX_BRANCHES + 1)]:
                self._drop(branch, known)
            branch.append(_Known(tokens, hashes))
            self._tokens += len(tokens)
            while self._tokens > self._max_tokens:
                oldest = next(iter(self._branches))
                self._drop(self._branches[oldest], self._branches[oldest][0])
                if not self._branches[oldest]:
                    del self._branches[oldest]

    def _drop(self, branch: list[_Known], known: _Known) -> None:
        branch[:] = [other for other in branch if other is not known]
        self._tokens -= len(known.tokens)

    def _first(self, tokens: NDArray[np.uint32]) -> bytes:
        return tokens[: self._block_tokens].tobytes()

    def _common_blocks(self, known: _Known, tokens: NDArray[np.uint32]) -> int:
        count = min(len(known.tokens), len(tokens))
        differs = known.tokens[:count] != tokens[:count]
        common = int(differs.argmax()) if differs.any() else count
        return min(common // self._block_tokens, len(known.hashes))
