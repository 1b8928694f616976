"""Block tables as one list of pages, a sequence's behind the other's: the form that FlashInfer reads.

Written on the device from what a step's buffers hold anyway, by one kernel that a graph may capture.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_page_lists"]

_PAGES = 1024  # that a program copies


def write_page_lists(
    block_tables: Tensor,
    context_lens: Tensor,
    starts: Tensor,
    pages: Tensor,
    last_page_tokens: Tensor,
    block_tokens: int,
) -> None:
    """Sequence `i` gets `pages[starts[i] : starts[i + 1]]`, of which the last page holds `last_page_tokens[i]` tokens.

    `block_tables` `[n, max_pages]` and `context_lens` `[n]` are read, `starts` `[n + 1]`, `pages` (room for all) and
    `last_page_tokens` `[n]` written; all int32. A context of 0 has no page, and 0 tokens in it.
    """
    num_sequences, max_pages = block_tables.shape
    _page_lists_kernel[(num_sequences, triton.cdiv(max_pages, _PAGES))](
        block_tables,
        context_lens,
        starts,
        pages,
        last_page_tokens,
        num_sequences,
        block_tables.stride(0),
        BLOCK_TOKENS=block_tokens,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        PAGES=_PAGES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _page_lists_kernel(
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    starts: tl.tensor,
    pages: tl.tensor,
    last_page_tokens: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    """One program: a part of one sequence's pages. Each repeats the sum over the sequences before."""
    sequence = tl.program_id(0)
    others = tl.arange(0, SEQUENCES)
    contexts = tl.load(context_lens + others, mask=others < num_sequences, other=0)
    counts = (contexts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    start = tl.sum(tl.where(others < sequence, counts, 0), 0)
    count = tl.sum(tl.where(others == sequence, counts, 0), 0)
    context = tl.sum(tl.where(others == sequence, contexts, 0), 0)
    if tl.program_id(1) == 0:
        tl.store(starts + sequence, start)
        tl.store(last_page_tokens + sequence, context - tl.maximum(count - 1, 0) * BLOCK_TOKENS)
        if sequence == num_sequences - 1:
            tl.store(starts + num_sequences, start + count)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    inside = page < count
    table = block_tables + sequence.to(tl.int64) * table_stride
    tl.store(pages + start + page, tl.load(table + page, mask=inside, other=0), mask=inside)
