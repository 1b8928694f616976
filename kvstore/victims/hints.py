"""What is said of which blocks stay: each tier's policy, and what engines know of the next use of blocks.

Of several that bear on a block the first counts: held, pinned, wanted by a queued request (`tiering.queued`), retained
(`kvstore.victims.retention`), the tier's policy or, where it has none, tail-first LRU.
"""

from __future__ import annotations

from eviction.base import Stop
from kvstore.errors import FailedPrecondition, InvalidArgument
from kvstore.layout import NONE
from kvstore.moves import U64
from kvstore.state import StoreState
from kvstore.victims.ranking import Rankings
from kvstore.victims.retention import MAX_PRIORITY

__all__ = ["Hints"]


class Hints:
    """Takes hints. They hold nothing."""

    __slots__ = ("_state",)

    def __init__(self, state: StoreState) -> None:
        self._state = state

    @property
    def rankings(self) -> Rankings:
        """The tiers' policies."""
        return self._state.rankings

    def retain(
        self,
        *,
        now_ms: int,
        session: int,
        namespace: int,
        hashes: U64,
        first: int,
        last: int,
        stop: Stop,
        priority: int,
        ttl_ms: int,
    ) -> None:
        """What an engine knows of the next use of blocks [first, last) of a chain ([n, 2]); those before them go with
        them. `stop` is why the answer to the chain ended; priority 0 or no time: it retains nothing, and ends what did.

        Raises: NotFound, FailedPrecondition, InvalidArgument. O(n).
        """
        state = self._state
        if namespace not in state.sessions.attached(session).namespaces:
            raise FailedPrecondition(f"this session has not opened namespace {namespace}")
        if len(hashes) > state.limits.max_message_blocks or not 0 <= first <= last <= len(hashes):
            raise InvalidArgument(f"blocks {first} to {last} of a chain of {len(hashes)}")
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidArgument(f"a priority is 0 to {MAX_PRIORITY}, not {priority}")
        state.tell_time(now_ms)
        rows = state.table.locate(hashes, namespace)
        if stop is not Stop.UNKNOWN:
            state.rankings.ended(rows, stop)
        above, mine = rows[:first], rows[first:last]
        kept = priority if ttl_ms else 0
        state.retention.put(
            mine[mine != NONE], above[above != NONE] if kept else above[:0], kept, now_ms + ttl_ms, now_ms
        )
        state.counters["retained"] += len(mine) if kept else 0
