"""What `kvstore record` is given: the prompts that were asked for, as long as somebody takes them.

Nothing is kept until somebody asks; then a bounded number of bytes is, and what is not taken in time is counted as
missed. An administrator gets hashes as the store has them; it is `record` that salts them before they reach a file.

Owner loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.moves import U64

__all__ = ["Asked", "Recording", "Taken"]

_KEPT_BYTES = 16 << 20
_TAKEN_BYTES = 2 << 20
_ABANDONED_MS = 30_000
_ROW_BYTES = 64  # of a prompt beside its hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, when its request first asked for it."""

    time_ms: int
    session: int
    namespace: int
    block_tokens: int
    hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Prompts in the order in which they came."""

    prompts: Sequence[Asked]
    missed: int
    """Prompts that were not taken in time since the recording began."""


class Recording:
    """See the module."""

    __slots__ = ("_bytes", "_missed", "_prompts", "_until_ms")

    def __init__(self) -> None:
        self._prompts: deque[Asked] = deque()
        self._bytes = 0
        self._missed = 0
        self._until_ms = -1

    def running(self, now_ms: int) -> bool:
        """Whether somebody takes what is noted; what an abandoned recording had is let go."""
        if self._until_ms >= 0 and now_ms > self._until_ms:
            self.stop()
        return self._until_ms >= 0

    def note(self, now_ms: int, *, session: int, namespace: int, block_tokens: int, hashes: U64) -> None:
        """A prompt was asked for."""
        prompt = Asked(
            time_ms=now_ms,
            session=session,
            namespace=namespace,
            block_tokens=block_tokens,
            hashes=hashes.tobytes(),
        )
        self._prompts.append(prompt)
        self._bytes += len(prompt.hashes) + _ROW_BYTES
        while self._bytes > _KEPT_BYTES:
            self._bytes -= len(self._prompts.popleft().hashes) + _ROW_BYTES
            self._missed += 1

    def take(self, now_ms: int) -> Taken:
        """What came since the last call; the first one begins. Asked less than every half minute, it ends."""
        self.running(now_ms)
        self._until_ms = now_ms + _ABANDONED_MS
        taken: list[Asked] = []
        size = 0
        while self._prompts and size < _TAKEN_BYTES:
            taken.append(self._prompts.popleft())
            size += len(taken[-1].hashes) + _ROW_BYTES
        self._bytes -= size
        return Taken(prompts=taken, missed=self._missed)

    def stop(self) -> None:
        """Nobody takes any more."""
        self._prompts.clear()
        self._bytes = self._missed = 0
        self._until_ms = -1
