"""Timing the two calls of a lookup: the local match and the acquire over the stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.blocks import ANSWER_S
from bench.timing import sample_ms
from kvstore.client import Namespace, Session
from kvstore.errors import KvstoreError
from kvstore.moves import Outcome

__all__ = ["Caller"]

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A session whose prompts are all cached in HBM. Raises KvstoreError where one is not."""

    session: Session
    namespace: Namespace

    def match_ms(self, prompts: Iterator[U64], length: int, samples: int) -> list[float]:
        """Milliseconds of each match of the first `length` blocks of the next prompt."""

        def look() -> None:
            found = self.session.match(self.namespace, next(prompts)[:length])
            if found.hits != length:
                raise KvstoreError(f"only {found.hits} of {length} blocks are cached")

        return sample_ms(look, samples)

    def call_ms(self, prompts: Iterator[U64], lengths: Iterator[int], samples: int) -> list[float]:
        """Milliseconds from each acquire to its grant.

        The release that follows is not timed, and is done before the next call.
        """
        session, times = self.session, []
        for lease in range(1, samples + 1):
            hashes = next(prompts)[: next(lengths)]
            start = time.perf_counter_ns()
            pending = session.acquire(self.namespace, lease, hashes)
            grant = pending.result(ANSWER_S)
            times.append((time.perf_counter_ns() - start) / 1e6)
            hits = int((grant.outcomes == Outcome.HIT_HBM).sum())
            if hits < len(hashes):
                raise KvstoreError(f"only {hits} of {len(hashes)} blocks are cached")
            pending.abandon()
            session.step()
            session.acquire(self.namespace, lease, hashes[:0]).result(
                ANSWER_S
            )  # in order: the release is done
        return times
