"""An acquire under way: what was asked for, and the grant when it comes.

`done` is one attribute read, so an engine may ask at every step; `result` waits and is for tools and tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client.namespace import Namespace
from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.layout import NONE
from kvstore.moves import Grant

__all__ = ["PendingGrant", "given"]


def given(slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """[n] which elements name a slot."""
    named: NDArray[np.bool_] = slots != NONE
    return named


class _Owner(Protocol):
    """What of a session is needed here."""

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Returns once something is so, or after that time."""
        ...

    def abandon(self, grant: PendingGrant) -> None:
        """Takes back what was, or will be, given."""
        ...


class PendingGrant:
    """One acquire. Created by `Session.acquire`; the session's lock covers its fields.

    Every slot in the grant has one local reference that belongs to whoever holds this object: `Session.drop_hbm` and
    `drop_dram` give them back one by one, `abandon` all at once, also before the answer is there.
    """

    __slots__ = (
        "_error",
        "_grant",
        "_session",
        "abandoned",
        "first",
        "hashes",
        "lease",
        "namespace",
        "private_fill",
        "reserve",
        "sent_at",
    )

    def __init__(
        self,
        session: _Owner,
        *,
        namespace: Namespace,
        lease: int,
        hashes: NDArray[np.uint64],
        first: int,
        reserve: int,
        private_fill: bool,
    ) -> None:
        self._session = session
        self.namespace = namespace
        self.lease = lease
        self.hashes = hashes
        self.first = first
        self.reserve = reserve
        self.private_fill = private_fill
        self.sent_at = 0.0
        self.abandoned = False
        self._grant: Grant | None = None
        self._error: KvstoreError | None = None

    def done(self) -> bool:
        """Whether there is an answer: a grant or an error."""
        return self._grant is not None or self._error is not None

    @property
    def error(self) -> KvstoreError | None:
        """Why nothing was granted; None while waiting and when granted."""
        return self._error

    def result(self, timeout_s: float) -> Grant:
        """The grant. Raises: what refused it; DeadlineExceeded when there is no answer in time (it may still come)."""
        deadline = time.monotonic() + timeout_s
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"no answer to an acquire within {timeout_s} s")
            self._session.wait_until(self.done, left)
        if self._error is not None:
            raise self._error
        assert self._grant is not None
        return self._grant

    def abandon(self) -> None:
        """Nobody wants the grant any more: what it gave, or will give, goes back. Idempotent."""
        self._session.abandon(self)

    def resolve(self, grant: Grant) -> None:
        """The session's part: the answer is here."""
        self._grant = grant

    def fail(self, error: KvstoreError) -> None:
        """The session's part: there will be no grant."""
        self._error = error
