"""A request of the engine as the scheduling half keeps it. Nothing here outlives the engine's own record of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.chain import Item, RequestChain
from engine_adapter.external.link import Identity
from kvstore.client import Namespace, PendingGrant

__all__ = ["LiveRequest", "PendingLoad", "RequestFacts", "page_table"]

BlockIds = Sequence[Sequence[int]]
"""[groups][blocks] of a request, as the engine keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What the engine says of a request. `token_ids` is its own growing list, of confirmed tokens alone."""

    id: str
    token_ids: Sequence[int]
    identity: Identity
    items: tuple[Item, ...] = ()
    describe: Callable[[int, int], object] | None = None
    """The engine's own event for the blocks [begin, end) once they are stored; None: it wants none."""


@dataclass(slots=True)
class PendingLoad:
    """Blocks [begin, begin + n) of a request that the engine has taken pages for and waits for."""

    begin: int
    pages: NDArray[np.int64]  # [n, groups]
    until: float
    grant: PendingGrant | None = None  # None: to be asked for
    retry_at: float = 0.0

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(slots=True)
class LiveRequest:
    """One request, from `new` to `ended`."""

    facts: RequestFacts
    lease: int
    namespace: Namespace | None = None
    chain: RequestChain | None = None
    on_disk: int = 0  # of the leading blocks that were cached when it was new, those that only a disk had
    patience_until: float = 0.0  # for a lookup; 0: none has waited yet
    quiet_until: float = 0.0  # a lookup that just asked for patience is not looked up again before
    asked_ahead_at: float = 0.0
    asked_stream: int = 0  # on which it was: a daemon that died has forgotten it; 0: to be asked again
    local_blocks: int = 0  # that the engine had itself at the last lookup
    started: bool = False
    given_up: bool = False  # a load of it has failed: the rest is computed
    barred: bool = False  # computed under weights that are no more: neither read nor stored
    stored_blocks: int = 0  # leading blocks that need not be stored any more
    stores: set[int] = field(default_factory=set)  # jobs under way that read its pages
    load: PendingLoad | None = None


def page_table(block_ids: BlockIds, begin: int, end: int) -> NDArray[np.int64]:
    """[end - begin, groups] block ids. A group that has fewer blocks is padded by its null block."""
    pages = np.zeros((end - begin, len(block_ids)), dtype=np.int64)
    for group, ids in enumerate(block_ids):
        found = ids[begin:end]
        pages[: len(found), group] = found
    return pages
