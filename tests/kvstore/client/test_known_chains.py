"""A chain that begins with known hashes is the chain that would have been computed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.client.known_chains import KnownChains
from kvstore.identity import HashChain

KEY = bytes(range(32))
BLOCK = 4
prompts = st.lists(st.integers(0, 2), max_size=40)  # so few tokens that prompts share much


def array(tokens: list[int]) -> NDArray[np.uint32]:
    return np.array(tokens, dtype=np.uint32)


@given(st.lists(prompts, max_size=12), st.integers(8, 200))
def test_known_prefixes_change_no_hash(asked: list[list[int]], max_tokens: int) -> None:
    known = KnownChains(BLOCK, max_tokens=max_tokens)
    for tokens in asked:
        prefix = known.prefix(array(tokens))
        chain = HashChain(KEY, BLOCK, array(tokens), known=prefix)
        assert chain.hashes.tolist() == HashChain(KEY, BLOCK, tokens).hashes.tolist()
        known.remember(array(tokens), chain.hashes)


def test_a_prompt_that_goes_on_is_known_up_to_where_it_goes_on() -> None:
    known = KnownChains(BLOCK)
    first = list(range(42))
    known.remember(array(first), HashChain(KEY, BLOCK, first).hashes)
    assert len(known.prefix(array([*first, 7, 8, 9, 10, 11]))) == 10, (
        "the last block of the first was not whole"
    )
    assert len(known.prefix(array([*first[:20], 99, *first[21:]]))) == 5
    assert len(known.prefix(array([99, *first[1:]]))) == 0


def test_an_extended_chain_does_not_change_what_is_known() -> None:
    known = KnownChains(BLOCK)
    chain = HashChain(KEY, BLOCK, range(16))
    known.remember(array(list(range(16))), chain.hashes)
    chain.extend(range(16, 400))
    assert known.prefix(array(list(range(16)))).tolist() == chain.hashes[:4].tolist()


def test_the_oldest_prompts_go_first_and_the_bound_holds() -> None:
    """Kept prompts grew without end."""
    known = KnownChains(BLOCK, max_tokens=100)
    for start in range(0, 5000, 50):
        tokens = list(range(start, start + 40))
        known.remember(array(tokens), HashChain(KEY, BLOCK, tokens).hashes)
    assert len(known.prefix(array(list(range(4950, 4990))))) == 10
    assert len(known.prefix(array(list(range(4900, 4940))))) == 10
    assert len(known.prefix(array(list(range(4850, 4890))))) == 0


def test_many_prompts_behind_one_system_prompt_stay_few() -> None:
    known = KnownChains(BLOCK)
    shared = list(range(8))
    for i in range(50):
        tokens = [*shared, *range(1000 * i, 1000 * i + 8)]
        known.remember(array(tokens), HashChain(KEY, BLOCK, tokens).hashes)
    newest = [*shared, *range(49_000, 49_008)]
    assert len(known.prefix(array(newest))) == 4
    oldest = [*shared, *range(8)]
    assert len(known.prefix(array(oldest))) == 2, "what all share is still known"
