"""A request as the scheduler carries it: its tokens, how many of them are computed, and what became of it."""

from dataclasses import dataclass, field
from enum import Enum

from engine_adapter.base import Admission, RequestId

__all__ = ["Chunk", "FinishReason", "Request"]


class FinishReason(Enum):
    """Why a request produces nothing more."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`tokens` are the prompt and then what was generated; KV of the first `num_computed` is in the pages.

    `admission` is the first one: preemption does not change what the request was served from the cache.
    """

    id: RequestId
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    num_committed: int = 0
    passed_over: int = 0
    num_preemptions: int = 0
    admission: Admission | None = field(default=None)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that must still be computed before the next one can be chosen."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one request does in a step: compute tokens `[start, end)`; `samples` when the last token is among them."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.request.tokens)
