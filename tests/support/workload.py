"""A seeded stream of prompts that share prefixes: system prompts, long conversations, exact multiples of a block."""

from __future__ import annotations

import numpy as np

__all__ = ["Workload"]


class Workload:
    """Prompts as lists of token ids. Workers with one `family` share prefixes; `seed` orders what each asks for."""

    def __init__(
        self, *, family: int, seed: int, block_tokens: int, conversations: int, max_blocks: int
    ) -> None:
        self._family = family
        self._rng = np.random.default_rng([seed, 1])
        self._block_tokens = block_tokens
        self._conversations = conversations
        self._max_blocks = max_blocks

    def prompt(self) -> list[int]:
        """The next prompt: some turns of some conversation, cut anywhere or at a block's end."""
        number = int(self._rng.zipf(1.3)) % self._conversations
        whole = self._conversation(number)
        blocks = int(self._rng.integers(1, self._max_blocks + 1))
        length = blocks * self._block_tokens
        cut = int(self._rng.integers(0, 4))
        if cut:  # three in four end inside a block, one in four at its end
            length += int(self._rng.integers(0, self._block_tokens)) - self._block_tokens // 2
        return whole[: max(1, length)]

    def choose(self, chances: dict[str, float]) -> str:
        """One of the names, by chance."""
        return str(self._rng.choice(list(chances), p=list(chances.values())))

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high)."""
        return int(self._rng.integers(low, high))

    def _conversation(self, number: int) -> list[int]:
        """Tokens of a whole conversation: one of four system prompts, then its own."""
        tokens = self._block_tokens * (self._max_blocks + 2)
        system = np.random.default_rng([self._family, 1000 + number % 4])
        own = np.random.default_rng([self._family, number])
        head = system.integers(0, 1 << 15, size=tokens // 3)
        return [*head.tolist(), *own.integers(0, 1 << 15, size=tokens - tokens // 3).tolist()]
