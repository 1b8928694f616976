"""What a service's processes take: memory of their own, and shared memory that they keep open, counted once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Footprint", "footprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """In bytes."""

    own: int
    """Heaps, stacks, and their share of the libraries."""
    shared: int
    """Memfds: tables and extents."""


def footprint(pids: Iterable[int]) -> Footprint:
    """Of all these processes together."""
    pids = tuple(pids)
    memfds: dict[tuple[int, int], int] = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    memfds[status.st_dev, status.st_ino] = status.st_blocks * 512
    return Footprint(own=sum(_own_bytes(pid) for pid in pids), shared=sum(memfds.values()))


def _own_bytes(pid: int) -> int:
    """Proportional set size without shared memory."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields["Pss"] - fields["Pss_Shmem"]
