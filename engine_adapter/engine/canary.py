"""The engine's canary: now and then a cached block is computed again and compared with what the cache gave.

It finds what no checksum can: a block that is whole and belongs to other tokens, another model, other code. The last
cached block of a request is computed into a page of the request's own that nothing is in yet, over the cached blocks
before it. In deterministic mode every byte has to be equal; elsewhere floating point differs with the shape of a batch,
and an element may differ by a part of the largest of its layer and head.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.base import RequestId
from engine_adapter.engine.request import Chunk, Request
from engine_adapter.engine.runner import Runner

__all__ = ["Canary"]

_TOLERANCE = 1e-3
"""Of float32: chunks of other shapes give KV that differs by 7e-5 at most."""
_MAX_WAITING = 4


class Canary:
    """Chooses requests and checks them. The engine's thread."""

    def __init__(self, runner: Runner, pool: Tensor, block_tokens: int, *, every: int, exact: bool) -> None:
        """`pool` is `[page, layer, K|V, kv_head, token, head_dim]`; one of `every` requests with hits is checked."""
        self._runner = runner
        self._pool = pool
        self._block_tokens = block_tokens
        self._every = every
        self._tolerance = 0.0 if exact else _TOLERANCE
        self._seen = every - 1  # the first is checked: what is wrong from the start shows at once
        self._waiting: list[Request] = []
        self.checked_blocks = 0

    def admitted(self, chunks: Sequence[Chunk]) -> None:
        """The chunks of a step: requests that begin behind a cached prefix may be chosen."""
        for chunk in chunks:
            admission = chunk.request.admission
            if admission is None or not admission.cached_tokens or chunk.start != admission.cached_tokens:
                continue
            self._seen += 1
            if self._seen >= self._every and len(self._waiting) < _MAX_WAITING:
                self._seen = 0
                self._waiting.append(chunk.request)

    @property
    def due(self) -> bool:
        """Whether a request waits to be checked."""
        return bool(self._waiting)

    def take(self) -> Request:
        """The next one."""
        return self._waiting.pop(0)

    def check(self, request: Request, pages: NDArray[np.int32]) -> tuple[int, str]:
        """The block that was looked at, and how it differs: empty where it does not.

        `pages` is the request's block table; nothing is in the last one. No step is in flight.
        """
        assert request.admission is not None
        block = request.admission.cached_tokens // self._block_tokens - 1
        begin, end = block * self._block_tokens, (block + 1) * self._block_tokens
        shadow = Request(
            id=RequestId(f"canary of {request.id}"),
            tokens=[int(token) for token in request.tokens[: end + 1]],  # one more: nothing is sampled
            num_prompt=end,
        )
        table = np.append(pages[:block], pages[-1]).astype(np.int32)
        self._runner.launch([Chunk(request=shadow, start=begin, end=end)], [table]).wait()
        self.checked_blocks += 1
        return block, self._difference(self._pool[int(pages[block])], self._pool[int(pages[-1])])

    def _difference(self, cached: Tensor, computed: Tensor) -> str:
        """Of two blocks `[layer, K|V, kv_head, token, head_dim]`."""
        if torch.equal(cached, computed):
            return ""
        if not self._tolerance:
            different = int((cached != computed).sum())
            return f"{different} of {cached.numel()} elements of a recomputed block differ"
        cached, computed = cached.float(), computed.float()
        largest = computed.abs().amax(dim=(3, 4), keepdim=True).clamp(min=1e-6)
        worst = float(((cached - computed).abs() / largest).nan_to_num(nan=float("inf")).max())
        if worst <= self._tolerance:
            return ""
        return f"a recomputed block differs by {worst:.2g} of its largest element"
