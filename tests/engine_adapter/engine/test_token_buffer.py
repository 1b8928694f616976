"""A token buffer does what a list does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.engine.token_buffer import TokenBuffer

tokens = st.integers(-1, 2**31 - 1)


@given(
    st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 50), st.lists(st.tuples(st.integers(0, 3), tokens))
)
def test_it_does_what_a_list_does(prompt: list[int], capacity: int, steps: list[tuple[int, int]]) -> None:
    buffer, plain = TokenBuffer(np.array(prompt, np.uint32), capacity), list(prompt)
    for kind, token in steps:
        if kind == 0 or not plain:
            buffer.append(token)
            plain.append(token)
        elif kind == 1:
            buffer[len(plain) // 2] = plain[len(plain) // 2] = token
        elif kind == 2:
            assert buffer.pop() == plain.pop()
        else:
            del buffer[token % (len(plain) + 1) :]
            del plain[token % (len(plain) + 1) :]
        assert list(buffer) == plain
        assert len(buffer) == len(plain)
        assert buffer[1:5].tolist() == plain[1:5]
        assert not plain or (buffer[-1], buffer[0]) == (plain[-1], plain[0])


def test_what_was_taken_out_does_not_change() -> None:
    """A batch that was being prepared saw tokens that came later."""
    buffer = TokenBuffer(np.arange(4, dtype=np.uint32), 8)
    taken = buffer[1:3]
    buffer[1] = 9
    assert taken.tolist() == [1, 2]


def test_places_that_do_not_exist_are_refused() -> None:
    buffer = TokenBuffer(np.arange(4, dtype=np.uint32), 8)
    for place in (4, -5):
        with pytest.raises(IndexError):
            buffer[place]
        with pytest.raises(IndexError):
            buffer[place] = 1
    with pytest.raises(ValueError, match="only the end"):
        del buffer[1:2]
    with pytest.raises(IndexError):
        TokenBuffer(np.empty(0, np.uint32), 0).pop()
