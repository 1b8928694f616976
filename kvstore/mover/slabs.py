"""The mover's thread for slabs: opens and drops them in the order in which it is asked to, beside all other work.

Making a slab allocates and syncs a file, which takes a full or slow disk seconds; so moves of other slabs go on, and
those that name a slab on its way wait here until it is open or is not to be had.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from kvstore.wire import mover as wire
from tiers.base import Moves

__all__ = ["SlabThread"]


class SlabThread:
    """One thread. `put` and `held` are the socket thread's; the two callables run in the thread itself."""

    def __init__(
        self, work: Callable[[wire.Slab | wire.Drop], None], release: Callable[[list[Moves]], None]
    ) -> None:
        """`work` opens or drops, and raises nothing; `release` is given the pieces that waited for it."""
        self._work = work
        self._release = release
        self._condition = threading.Condition()  # guards the next four
        self._asked: deque[wire.Slab | wire.Drop] = deque()
        self._under_way: Counter[int] = Counter()  # by extent, the one at work included
        self._waiting: dict[int, list[Moves]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="slabs")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, message: wire.Slab | wire.Drop) -> None:
        """Opens or drops a slab, behind all that was asked for before."""
        with self._condition:
            self._under_way[message.extent] += 1
            self._asked.append(message)
            self._condition.notify()

    def held(self, piece: Moves) -> bool:
        """Whether a piece has to wait for its slab; then it is kept, and comes back through `release`."""
        extent = int(piece["nvme_extent"][0])
        with self._condition:
            if not self._under_way[extent]:
                return False
            self._waiting.setdefault(extent, []).append(piece)
            return True

    def close(self) -> None:
        """Forgets what waits; returns when what it is at has ended."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (message := self._next()) is not None:
            self._work(message)
            self._release(self._done(message.extent))

    def _next(self) -> wire.Slab | wire.Drop | None:
        with self._condition:
            while not self._closed:
                if self._asked:
                    return self._asked.popleft()
                self._condition.wait()
            return None

    def _done(self, extent: int) -> list[Moves]:
        """The pieces that wait for nothing any more."""
        with self._condition:
            self._under_way[extent] -= 1
            if self._under_way[extent]:
                return []
            del self._under_way[extent]
            return self._waiting.pop(extent, [])
