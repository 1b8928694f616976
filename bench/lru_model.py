"""What a plain LRU cache of blocks would hit: the reference beside which `pressure` puts what the service does. Pure.

Textbook LRU over single blocks: a visit touches a document's blocks in order, what is not there is computed and put in,
and the block that was used longest ago goes. Its known weakness: of a document that does not fit any more the first
blocks go first, so nothing that is left behind them is of use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["plain_lru_hits"]


def plain_lru_hits(
    documents: Sequence[int], first: Iterable[int], then: Iterable[int], capacity_blocks: int
) -> int:
    """Leading hits, in blocks, of the visits `then`, after the visits `first`. O(blocks visited).

    `documents`: blocks of each document.
    """
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    for document in first:
        _visit(cache, document, documents[document], capacity_blocks)
    return sum(_visit(cache, document, documents[document], capacity_blocks) for document in then)


def _visit(cache: OrderedDict[tuple[int, int], None], document: int, blocks: int, capacity: int) -> int:
    """Leading blocks that were there; all of them are the newest afterwards."""
    hits = next((block for block in range(blocks) if (document, block) not in cache), blocks)
    for block in range(blocks):
        cache[document, block] = None
        cache.move_to_end((document, block))
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits
