"""A namespace over the life of its session: the key that its chains are made with."""

from __future__ import annotations

import numpy as np

from kvstore.client import Namespace
from kvstore.identity import HashChain

OLD, NEW = bytes(32), bytes(range(32))
TOKENS = list(range(40))


def test_a_daemon_without_its_old_secret_gives_chains_another_key() -> None:
    """A client went on with the key of a secret that was gone: nobody else could hit what it stored."""
    namespace = Namespace({"model": b"m"}, 4, 1, OLD)
    assert namespace.chain(TOKENS).hashes.tolist() == HashChain(OLD, 4, TOKENS).hashes.tolist()
    namespace.reopened(2, NEW)
    assert namespace.handle == 2
    assert namespace.chain(TOKENS).hashes.tolist() == HashChain(NEW, 4, TOKENS).hashes.tolist()


def test_an_array_that_the_caller_changes_later_changes_no_chain() -> None:
    """A prompt was remembered by the caller's own array: its next use gave hashes of tokens that it had not."""
    namespace = Namespace({"model": b"m"}, 4, 1, OLD)
    tokens = np.arange(40, dtype=np.uint32)
    namespace.chain(tokens)
    tokens[:] = 7
    assert namespace.chain(tokens).hashes.tolist() == HashChain(OLD, 4, [7] * 40).hashes.tolist()
    assert namespace.chain(TOKENS).hashes.tolist() == HashChain(OLD, 4, TOKENS).hashes.tolist()
