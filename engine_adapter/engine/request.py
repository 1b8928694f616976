"""A request as the scheduler carries it: its tokens, how many of them are computed, and what became of it.

A step is launched before the one before it has ended, so a request's last token may not be known yet: `UNKNOWN` stands
in its place from the launch of the step that chooses it until that step has ended.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine_adapter.base import Admission, Arriving, RequestId
from engine_adapter.engine.token_buffer import TokenBuffer

__all__ = ["UNKNOWN", "Chunk", "FinishReason", "Request"]

UNKNOWN = -1
"""In a request's tokens: a launched step is choosing this one."""


class FinishReason(Enum):
    """Why a request produces nothing more."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`tokens` are the prompt and then what was generated, `UNKNOWN` at the end for what is being chosen.

    KV of the first `num_computed` tokens is in the pages once the launched steps have ended; `num_in_flight` of them
    compute tokens of this request. At `limit_tokens`, prompt and answer, it ends for sure. `admission` is the first
    one: preemption does not change what the request was served from the cache. Of the prompt,
    `num_overtaken` tokens were loaded while tokens before them were computed. Until a step has been launched that
    waits for it, `arriving` is the cached prefix that is still being loaded.
    """

    id: RequestId
    tokens: list[int] | TokenBuffer
    num_prompt: int
    limit_tokens: int | None = None
    num_computed: int = 0
    num_committed: int = 0
    num_in_flight: int = 0
    passed_over: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    admission: Admission | None = field(default=None)
    arriving: Arriving | None = field(default=None)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that must still be computed before the next one can be chosen; 0 where no next one is wanted."""
        if self.limit_tokens is not None and len(self.tokens) >= self.limit_tokens:
            return 0
        return len(self.tokens) - self.num_computed

    def forget_unknown(self) -> None:
        """Drop what is being chosen: the request ends without it."""
        while len(self.tokens) and self.tokens[-1] == UNKNOWN:
            self.tokens.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one request does in a step: compute tokens `[start, end)`; `samples` when the last token is among them."""

    request: Request
    start: int
    end: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.end == len(self.request.tokens))
