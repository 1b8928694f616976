"""The runner of the process that schedules: tells the members each step, then launches its own part of it.

A step's last sum is complete only when every member has queued its part of it behind everything else that it computes
in that step. So the end of the own part is the end of all parts, and pages may be committed.
"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine.parallel.messages import PREPARE, StepWriter, Table, same_numbers, send
from engine_adapter.engine.request import Chunk
from engine_adapter.engine.runner import LaunchedStep, Runner
from kvstore.errors import Unavailable

__all__ = ["Connected", "ParallelRunner"]


_GRACE_S = 1.0
"""A member's death shows here before it is certain: whoever watches the processes says it better."""


class Connected(Protocol):
    """A member that can be told something."""

    @property
    def connection(self) -> socket.socket: ...


class ParallelRunner:
    """See the module and `Runner`."""

    def __init__(
        self,
        own: Runner,
        members: Sequence[Connected],
        numbers_of: Callable[[Table], Table] = same_numbers,
    ) -> None:
        """`numbers_of`: of pages of this process, what they are called in all of them."""
        self._own = own
        self._members = members
        self._writer = StepWriter(numbers_of)

    def prepare(self) -> None:
        """See Runner."""
        self._tell(PREPARE)
        self._own.prepare()

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        """See Runner. Unavailable when a member has gone: no step can be completed any more."""
        try:
            self._tell(self._writer.encode(chunks, tables))
            return self._own.launch(chunks, tables)
        except (RuntimeError, Unavailable):  # torch's, where a sum is broken off
            time.sleep(_GRACE_S)
            raise

    def _tell(self, message: NDArray[np.int32]) -> None:
        for member in self._members:
            try:
                send(member.connection, message)
            except OSError as error:
                raise Unavailable(f"a member of the model's processes has gone: {error}") from error
