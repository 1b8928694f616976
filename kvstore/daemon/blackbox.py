"""Where a service's flight recording is: in memory while anybody of it lives, in files when the keeper has ended.

The memory is a memfd whose name tells services apart, held by daemon and keeper, so it can be read through /proc by its
own user without asking either: also while the daemon hangs, or is dead. The keeper writes it beside the socket when the
service ends, and at each crash of the daemon (`kvstore.keeper`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Mapping

from kvstore.recorder import RING_RECORDS, Event, RingRecorder, ring_bytes
from tiers.memfd import create_memfd

__all__ = ["BLACKBOX", "memory_name", "open_recorder", "saved_paths"]

BLACKBOX = "blackbox"
"""What the keeper calls its descriptor."""


def memory_name(socket_path: str) -> str:
    """The memfd's name, which /proc shows."""
    digest = hashlib.blake2b(os.fsencode(socket_path), digest_size=8).hexdigest()
    return f"kvstore-{BLACKBOX}-{digest}"


def saved_paths(socket_path: str) -> tuple[str, str]:
    """Where the keeper leaves the recording: at the service's end, and at the daemon's last crash."""
    return f"{socket_path}.{BLACKBOX}", f"{socket_path}.{BLACKBOX}.crash"


def open_recorder(socket_path: str, inherited: Mapping[str, int]) -> tuple[RingRecorder, int]:
    """The recorder of this life, which goes on where the last one ended, and its descriptor.

    Raises ResourceExhausted where memory is short.
    """
    size = ring_bytes(RING_RECORDS)
    fd = inherited.get(BLACKBOX)
    if fd is None or os.fstat(fd).st_size != size:
        fd = create_memfd(memory_name(socket_path), size)
    recorder = RingRecorder(memoryview(mmap.mmap(fd, size)), lambda: time.time_ns() // 1000)
    recorder.note(Event.BOOT, a=os.getpid())
    return recorder, fd
