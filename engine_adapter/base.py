"""The contract between an engine and whatever keeps its KV: who calls what, when, and what may block.

The engine's scheduler owns the calls: one thread, one engine step at a time. Nothing here waits for anybody except
`wait`, which the engine calls only when it has nothing to compute.

A request's life, as the block manager sees it:

    enqueue → admit (None … Admission) → { reserve → kernels → commit } each step → release
                                          ↑ a preempted request is released and enqueued again with all its tokens

Pages. The pool is one array of equal pages. The engine reads a page as `[layer, K|V, kv_head, token, head_dim]` of
its KV dtype, payload first, padded up to 4 KiB; `block_tokens` tokens a page. A block table is a row of page numbers:
token `t` of a request lives in page `pages(request)[t // block_tokens]` at offset `t % block_tokens`. Pages that hold
a cached prefix come first in the table and are read-only to the engine; recycled pages hold arbitrary bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Admission", "Arriving", "BlockManager", "Ending", "Pages", "Reach", "RequestId"]

RequestId = NewType("RequestId", str)
EVERYTHING = 1 << 62
"""A `stop_tokens` that stops nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the pool lies: `count` pages of `page_bytes`, back to back from `address` on.

    `count` covers the whole range, whose end may be address space without memory: only pages that a block table names
    may be touched. `owner` is whatever has to live for as long as the pages are used. `numpy.asarray` of pages in host
    memory and `torch.as_tensor` of pages on a GPU view them uncopied as `[count, page_bytes]` and keep the owner.
    """

    address: int
    count: int
    page_bytes: int
    device: str  # as torch says it: "cpu" or "cuda:0"
    owner: object

    @property
    def __array_interface__(self) -> Mapping[str, object]:
        if self.device != "cpu":
            raise AttributeError(f"pages of {self.device} are not in host memory")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]:
        if self.device == "cpu":
            raise AttributeError("these pages are in host memory")
        return self._interface()

    def _interface(self) -> Mapping[str, object]:
        return {
            "shape": (self.count, self.page_bytes),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class Arriving(Protocol):
    """A cached prefix that is still on its way into an admitted request's pages, layer by layer."""

    def wait_for(self, layer: int) -> bool:
        """Returns when that layer, and all before it, of all cached blocks are there. False: they do not come.

        Waits for a bounded time since something came last. On the engine's thread, before a kernel that reads the layer
        is launched.
        """
        ...

    @property
    def differs(self) -> bool:
        """Whether it does not come because it is not what was stored: who asks for the prefix again computes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What an admitted request starts with.

    `cached_tokens` is a multiple of `block_tokens` and less than the number of tokens given to `enqueue`: at least one
    token is always computed, so the first logits exist. `cached_by_tier` says where they were found when the request
    was admitted (keys `"hbm"`, `"dram"`, `"nvme"`); its values add up to `cached_tokens`. `arriving` is there where the
    cached pages are not complete yet: then no layer of them may be read before it has been waited for.
    """

    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    arriving: Arriving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far the KV of a running request reaches, and how far its next step may.

    `computed_tokens` are in its pages, or will be once launched steps have ended: more than were computed where blocks
    behind them have been loaded meanwhile, of which one token at least is left to compute. No step may compute tokens
    from `stop_tokens` on: those are being loaded. Both the same: nothing is to be computed now.
    """

    computed_tokens: int
    stop_tokens: int


class Ending(Enum):
    """Why an answer ended, as far as that says when its conversation goes on."""

    TOOL_USE = "tool_use"
    """It called a tool: as soon as that has answered."""
    END_TURN = "end_turn"
    """It is somebody else's turn."""


class BlockManager(Protocol):
    """Gives pages to requests and finds cached prefixes. One thread calls it; ids are unique among live requests."""

    @property
    def block_tokens(self) -> int:
        """Tokens a page holds."""
        ...

    def kv_pages(self) -> Pages:
        """The whole pool; the same place for the manager's life."""
        ...

    def enqueue(
        self, request: RequestId, token_ids: Sequence[int] | NDArray[np.uint32], *, ahead: int = 0
    ) -> None:
        """The request waits to be scheduled: hash it and start prefetching. Takes no lease and no page.

        `token_ids` is the engine's own growing list, or the same as an array: copy what is kept. `ahead`: requests that
        are to be admitted before it, as far as is known; with the pace of admissions that gives prefetch a deadline.
        """
        ...

    def prepare(self, request: RequestId) -> None:
        """An enqueued request is among the next to be admitted, and none before it lacks pages: load what of its prefix
        is in memory already. May be said at every step, and may do nothing; hinders nobody. Never waits.
        """
        ...

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        """The request is to run: lease its cached prefix and take pages for `num_tokens` tokens in all.

        None means "not yet" (a load under way, no free pages, or another request is computing the same prefix): ask
        again at a later step. A None leaves nothing behind that hinders other requests. Never blocks.

        Raises Unavailable where there is no use in asking again, with a line that a person can act on: the request is
        to end with that error, and to be released.
        """
        ...

    def pages(self, request: RequestId) -> NDArray[np.int32]:
        """The block table of an admitted request so far, `[num_pages_of_request]`; valid until the next `reserve`."""
        ...

    def reserve(self, request: RequestId, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens in all. False, and nothing changed: no free page now."""
        ...

    def reach(self, request: RequestId, num_tokens: int) -> Reach:
        """A running request has computed so many tokens, those of launched steps among them, and more are to be: before
        each of its prefill steps, after which its table may have other pages behind `num_tokens`. Never waits.
        """
        ...

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step that computed these tokens [begin, end) of prompts took so long."""
        ...

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in the pages, its kernels have completed, its tokens are final.

        `token_ids` is the request's whole list, at least `num_tokens` long. Full blocks among them may be sealed.
        """
        ...

    def ended(self, request: RequestId, ending: Ending) -> None:
        """The answer to a request has ended by itself, for this reason; its release follows. Never waits."""
        ...

    def release(self, request: RequestId) -> None:
        """The request finished, was aborted or was preempted, queued or admitted. Idempotent; unknown ids pass."""
        ...

    def report_wrong(self, request: RequestId, block: int, detail: str) -> None:
        """The cached block at this position of an admitted request's table is not what its tokens give. Never waits.

        It is a miss from then on. `detail`: one line on how it differs.
        """
        ...

    def take_wrong(self) -> list[RequestId]:
        """Admitted requests of which a cached block was found wrong, by whomever: so is what was computed with it.

        Asked before each step; a request is named until it is released. Never waits.
        """
        ...

    def computing(self, steps: int) -> None:
        """So many steps are under way; 0: nothing is to be computed. Called before a launch, and when work has run out.

        Not between two steps: what a copy begins there would go on into the next one. Never waits.
        """
        ...

    def end_step(self) -> None:
        """Once a step, after its kernels have completed and its commits are in: send what changed. Never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a pending `admit` may have another answer, at most `timeout_s`. Called only when idle."""
        ...
