"""What an engine with memory of its own may still have of blocks that were found wrong, and what it computes from them.

Such an engine lets go of a block once it has copied it, so no slot says what it computes with. For as long as its
session lives, what it seals directly behind a wrong block is not published, nor what it seals behind that. In memory
alone: a daemon that is killed forgets it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import U64

__all__ = ["Suspects"]


class Suspects:
    """Hashes of blocks, by session."""

    __slots__ = ("_by_session",)

    def __init__(self) -> None:
        self._by_session: dict[int, set[bytes]] = {}

    def add(self, sessions: Iterable[int], hashes: U64) -> None:
        """These sessions may have these blocks ([n, 2])."""
        names = {block.tobytes() for block in hashes}
        for session in sessions:
            self._by_session.setdefault(session, set()).update(names)

    def forget(self, session: int) -> None:
        """It has ended, and what it had with it."""
        self._by_session.pop(session, None)

    def behind(self, session: int, seals: NDArray[np.void]) -> NDArray[np.bool_]:
        """[n] which of these SEAL[] of a session lie behind suspects of its; they are such from now on."""
        found = np.zeros(len(seals), dtype=np.bool_)
        names = self._by_session.get(session)
        if names:
            for at in np.argsort(seals["depth"], kind="stable").tolist():
                if seals["depth"][at] and seals["parent"][at].tobytes() in names:
                    names.add(seals["hash"][at].tobytes())
                    found[at] = True
        return found
