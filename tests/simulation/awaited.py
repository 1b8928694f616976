"""Nobody waits for what has come, or for what nobody brings: a wake-up that is missed shows nowhere else.

Engines of the simulated machine ask again whenever they like, as a real one does not that waits to be told.
"""

from __future__ import annotations

import numpy as np

from kvstore.layout import NONE
from kvstore.moves import MoveKind
from tests.simulation.life import Life
from tests.simulation.shape import Wrong

__all__ = ["check_waits"]

_PREFETCHED, _DEMANDED, _MOVING = 1, 2, 3  # as kvstore.tiering.promoting has them


def check_waits(life: Life) -> None:
    """Raises Wrong where a lease waits for a row that is resolved, or a read is in nobody's hands."""
    state = life.store._state
    for (session, lease), wait in state.waits._waits.items():
        pivot = wait.rows == wait.pivot
        if (
            wait.slots_of is None
            and not state._unresolved(wait.rows[pivot], wait.words[pivot], session).any()
        ):
            raise Wrong(f"lease {lease} of session {session} waits for row {wait.pivot}, which is resolved")
    _check_reads(life)


def _check_reads(life: Life) -> None:
    """Whatever is on its way into DRAM is queued for its path's mover, or with it, and counted once."""
    dram, promoting = life.store._state.dram, life.store._moving.promoting
    progress, slots = promoting._progress, np.arange(len(dram), dtype=np.uint32)
    coming = slots[dram.filling(slots) & (dram.row[slots] != NONE)]
    if not np.array_equal(np.flatnonzero(progress), coming):
        raise Wrong(f"{coming} are on their way into DRAM, and reads are for {np.flatnonzero(progress)}")
    ahead, demanded, moving = (np.flatnonzero(progress == each) for each in (_PREFETCHED, _DEMANDED, _MOVING))
    counted = (promoting.queued_ahead, promoting.queued - promoting.queued_ahead, promoting._moving)
    if counted != (len(ahead), len(demanded), len(moving)):
        raise Wrong(f"{counted} reads are counted, {len(ahead)}, {len(demanded)} and {len(moving)} there are")
    flights = life.store._moving._flights._table
    held = flights["dram"][(flights["id"] != 0) & (flights["kind"] == MoveKind.READ)]
    for wanted, there in (
        (ahead, _queued(life, [[part for _, _, part in path.prefetched] for path in promoting._paths])),
        (demanded, _queued(life, [list(path.demanded) for path in promoting._paths])),
        (moving, held),
    ):
        if not np.isin(wanted, there).all():
            raise Wrong(f"reads into {np.setdiff1d(wanted, there)} are in nobody's hands")


def _queued(life: Life, parts: list[list[np.ndarray]]) -> np.ndarray:
    """DRAM slots in the queues of the paths that have their blocks."""
    state = life.store._state
    found = [np.empty(0, dtype=np.uint32)]
    for number, of_path in enumerate(parts):
        for part in of_path:
            part = part[state.dram.filling(part) & (state.dram.row[part] != NONE)]
            found.append(part[state.nvme.devices(state.columns.nvme[state.dram.row[part]]) == number])
    return np.concatenate(found)
