"""Requests as they ask for their prompts, each once: for the shadow of other sizes of DRAM, and for recordings.

A request asks again whenever something that it waited for has come; it is known by its lease. Owner loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvstore.daemon.recording import Recording
from kvstore.daemon.session import Session
from kvstore.daemon.shadow import Shadow
from kvstore.moves import U64

__all__ = ["Requests"]

_REMEMBERED = 8192
_DIGITS = 9  # of a number that fits 32 bits


class Requests:
    """See the module."""

    __slots__ = ("_block_tokens", "_known", "recording", "shadow")

    def __init__(self, dram_bytes: int) -> None:
        self.shadow = Shadow(dram_bytes)
        self.recording = Recording()
        self._block_tokens: dict[int, int] = {}  # by namespace
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()

    def asked(self, session: Session, namespace: int, lease: int, hashes: U64, now_ms: int) -> None:
        """A request asked for its prompt, [n, 2] hashes, perhaps not for the first time."""
        known = (session.id, lease)
        if known in self._known:
            return
        self._known[known] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        self.shadow.note(hashes, session.slot_bytes)
        if self.recording.running(now_ms):
            self.recording.note(
                now_ms,
                session=session.id,
                namespace=namespace,
                block_tokens=self._block_tokens.get(namespace, 0),
                hashes=hashes,
            )

    def namespace_opened(self, namespace: int, parts: Mapping[str, bytes]) -> None:
        """A namespace has this handle; `parts` are what it is (kvstore/identity.py)."""
        text = parts.get("block_tokens", b"")
        self._block_tokens[namespace] = int(text) if text.isdigit() and len(text) <= _DIGITS else 0

    def session_ended(self, session: Session) -> None:
        """The next session of its number numbers its leases anew."""
        for known in [known for known in self._known if known[0] == session.id]:
            del self._known[known]

    def work(self) -> None:
        """What can wait until no request does."""
        self.shadow.work()
