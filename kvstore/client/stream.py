"""The thread that keeps a session connected: attach, read the stream, and resume when either side was gone.

A lost stream or a restarted daemon costs the engine nothing but time: what is held is stated, what was not answered is
sent again. A daemon that no longer knows the session (everything was killed) is attached to anew once nothing here
uses a slot of the old session any more, since only then can no page be given out twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client.grant import given
from kvstore.client.rpc import Rpc, StreamCall
from kvstore.client.state import SessionState
from kvstore.errors import KvstoreError, NotFound, Unauthenticated
from kvstore.faults import fault
from kvstore.wire.packed import u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Connection", "Stream"]

_LOG = logging.getLogger("kvstore.client")
_FIRST_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 0.5
_IDLE_POLL_S = 0.05


class Connection(Protocol):
    """What the stream needs of its session: how to attach it."""

    @property
    def token(self) -> bytes:
        """Of the last attach."""
        ...

    def resume(self, state: SessionState) -> None:
        """Attaches again and states what is held. Raises NotFound: the daemon does not know the session."""
        ...

    def renew(self, state: SessionState) -> None:
        """Attaches a new session in the place of one that is gone."""
        ...

    def wait_mapped(self, hbm: NDArray[np.uint32], dram: NDArray[np.uint32]) -> bool:
        """Whether these slots can be reached, after a moment's wait where their extents are new."""
        ...


class Stream:
    """Runs one session's stream. `start` after the first attach, `stop` at the end."""

    def __init__(self, rpc: Rpc, state: SessionState, connection: Connection) -> None:
        self._rpc = rpc
        self._state = state
        self._connection = connection
        self._stopping = threading.Event()
        self._call: StreamCall | None = None
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="kvstore-stream", daemon=True)

    def start(self) -> None:
        """Begins; the session is attached already."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the stream and the thread."""
        self._stopping.set()
        self._state.close_stream()
        call = self._call
        if call is not None:
            call.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        attached = True
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            try:
                if not attached:
                    self._attach_again()
                    attached = True
                if self._read():
                    backoff_s = _FIRST_BACKOFF_S
            except Exception as error:  # noqa: BLE001 (the thread's boundary: whatever fails, the session goes on)
                expected = isinstance(error, KvstoreError | OSError)
                _LOG.log(
                    logging.INFO if expected else logging.ERROR, "stream: %s", error, exc_info=not expected
                )
            attached = False
            self._state.close_stream()
            self._stopping.wait(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    def _attach_again(self) -> None:
        if not self._lost:
            try:
                self._connection.resume(self._state)
                return
            except (NotFound, Unauthenticated) as error:
                _LOG.warning("the daemon does not know this session any more: %s", error)
                self._state.forget(f"the session was lost: {error}")
                self._lost = True
        self._await(self._state.idle)
        if not self._stopping.is_set():
            self._connection.renew(self._state)
            self._lost = False

    def _await(self, ready: Callable[[], bool]) -> None:
        while not self._stopping.is_set() and not ready():
            self._stopping.wait(_IDLE_POLL_S)

    def _read(self) -> bool:
        """Opens the stream and applies messages until it ends; whether any came."""
        number = self._state.open_stream()
        self._call = call = self._rpc.stream(self._requests(number), self._connection.token)
        came = False
        try:
            if self._stopping.is_set():
                return False
            for message in call:
                came = True
                self._state.apply(message, reachable=self._reachable(message))
                fault("client.applied")
        except KvstoreError as error:
            if not self._stopping.is_set():
                _LOG.info("the stream ended: %s", error)
        finally:
            self._state.close_stream()
            call.close()
            self._call = None
        return came

    def _requests(self, number: int) -> Iterator[pb.ClientMessage]:
        while (message := self._state.next_message(number)) is not None:
            fault("client.composed")
            yield message

    def _reachable(self, message: pb.ServerMessage) -> bool:
        """Descriptors of new extents travel on another socket: wait for them before anybody uses the slots."""
        grant, ahead = message.grant, message.slots
        if not (grant.hbm_slots or grant.reserve_slots or ahead.hbm_slots or ahead.dram_slots):
            return True
        hbm = u32_of(grant.hbm_slots + grant.reserve_slots + ahead.hbm_slots)
        dram = u32_of(grant.dram_slots + ahead.dram_slots)
        return self._connection.wait_mapped(hbm[given(hbm)], dram[given(dram)])
