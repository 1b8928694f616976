"""The border to a tier's policy, which may be another package's: answers are checked here, and what it raises caught.

A slot that is freed twice, or while somebody holds it, costs more than any policy can gain. So a policy is believed as
long as it keeps its contract; after its first fault it is asked nothing more, and the store orders the tier itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Policy, Rows, Stop, Use
from kvstore.layout import Tier

__all__ = ["Guarded", "PolicyFault", "raised_in"]

_MOST_CHARACTERS = 300  # of what a policy says that it raised: it stands in a line of status
_ONE, _MOST_CALLS = np.uint8(1), np.uint8(255)
_NO_ROWS: Rows = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFault:
    """Why a tier goes on without its policy."""

    tier: Tier
    policy: str
    """Its name."""
    what: str
    """What it did, as the end of a sentence that begins with its name."""


class Guarded:
    """A policy of whatever package. No call raises; one that finds a fault says so to `failed` and answers nothing."""

    __slots__ = ("_call", "_failed", "_passed", "policy")

    def __init__(self, policy: Policy, rows: int, failed: Callable[[str], None]) -> None:
        """`rows`: of the table. `failed` is told what it did, and has it asked no more."""
        self.policy = policy
        self._failed = failed
        self._passed: NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        """[rows] the number of the call in which the owner let each go."""
        self._call = np.uint8(0)

    def __len__(self) -> int:
        return len(self.policy)

    def use(self, use: Use) -> None:
        """As the policy's."""
        try:
            self.policy.use(use)
        except Exception as error:  # noqa: BLE001 (code of others: the tier goes on without it)
            self._raised("use", error)

    def ended(self, rows: Rows, stop: Stop) -> None:
        """As the policy's."""
        try:
            self.policy.ended(rows, stop)
        except Exception as error:  # noqa: BLE001 (as above)
            self._raised("ended", error)

    def remove(self, rows: Rows) -> None:
        """As the policy's."""
        try:
            self.policy.remove(rows)
        except Exception as error:  # noqa: BLE001 (as above)
            self._raised("remove", error)

    def victims(self, count: int, now_s: float, may_go: MayGo) -> Rows:
        """As the policy's: distinct rows, at most `count`, of those that this call was told may go.

        O(rows that it asked about).
        """
        call = self._next_call()

        def noted(rows: Rows) -> NDArray[np.bool_]:
            good = may_go(rows)
            self._passed[rows] = good * call
            return good

        try:
            answer = self.policy.victims(count, now_s, noted)
            named = np.asarray(answer)
            wrong = self._wrong(named, count)
        except Exception as error:  # noqa: BLE001 (as above)
            self._raised("victims", error)
            return _NO_ROWS
        if wrong:
            self._failed(f"named victims that are none: {wrong}")
            return _NO_ROWS
        return named if named.dtype == np.uint32 else named.astype(np.uint32)

    def _wrong(self, named: NDArray[np.generic], count: int) -> str:
        """What is wrong with an answer, empty where it is right. O(n log n) of the answer alone."""
        if not named.size:
            return ""
        if named.ndim != 1 or named.dtype.kind not in "ui":
            return f"an array [n] of row numbers is expected, not {named.ndim}-dimensional {named.dtype}"
        if len(named) > count:
            return f"{len(named)} where {count} were asked for"
        ordered = np.sort(named) if len(named) > 1 else named
        if (ordered[1:] == ordered[:-1]).any():
            return "one twice"
        if ordered[0] < 0 or ordered[-1] >= len(self._passed):
            return f"rows beyond the {len(self._passed)} of the table"
        if not (self._passed[named] == self._call).all():
            return "some that it did not ask `may_go` about, or that may not go"
        return ""

    def _next_call(self) -> np.uint8:
        if self._call == _MOST_CALLS:  # numbers begin again: what was noted under them is forgotten
            self._passed.fill(0)
            self._call = np.uint8(0)
        self._call += _ONE
        return self._call

    def _raised(self, hook: str, error: Exception) -> None:
        self._failed(raised_in(f"`{hook}`", error))


def raised_in(where: str, error: Exception) -> str:
    """What a policy did that raised there, as `PolicyFault.what` has it: in one line, with the innermost place."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"raised in {where}: {text[:_MOST_CHARACTERS]} ({place})"
