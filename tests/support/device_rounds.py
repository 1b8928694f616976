"""What must hold of a device's memory when the processes that map it are killed: for the twin and for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.device_process import DeviceProcess

__all__ = ["bytes_outlive_their_maker", "kill_and_attach", "started"]


@contextmanager
def started(kind: str, count: int = 1) -> Iterator[list[DeviceProcess]]:
    """Processes that have opened the device; killed at the end."""
    processes = [DeviceProcess(kind) for _ in range(count)]
    try:
        for process in processes:
            process.ready()
        yield processes
    finally:
        for process in processes:
            process.kill()


def bytes_outlive_their_maker(kind: str, nbytes: int) -> None:
    """One process makes and fills an extent and is killed; another finds every byte, and its own work there too."""
    with started(kind) as (maker,):
        fd = maker.make(extent=3, nbytes=nbytes)
        assert maker.ask("fill", extent=3, seed=1, nbytes=nbytes) == {}
    with started(kind, 2) as (second, third):
        assert second.ask("adopt", fd, extent=7, nbytes=nbytes) == {}
        assert second.ask("check", extent=7, seed=1, nbytes=nbytes) == {"equal": True}
        assert second.ask("fill", extent=7, seed=2, nbytes=4096, at=nbytes - 4096) == {}
        second.kill()
        assert third.ask("adopt", fd, extent=1, nbytes=nbytes) == {}
        assert third.ask("check", extent=1, seed=2, nbytes=4096, at=nbytes - 4096) == {"equal": True}
        assert third.ask("adopt", fd, extent=2, nbytes=2 * nbytes)["error"] == "InvalidArgument"
        assert third.ask("adopt", fd, extent=1, nbytes=nbytes)["error"] == "AlreadyExists"
    os.close(fd)


def kill_and_attach(kind: str, fd: int, *, rounds: int, nbytes: int, side_by_side: int) -> None:
    """`rounds` processes, one after the other: each finds what the one before wrote, writes, and is killed.

    Before the first, the extent holds the pattern of seed 0 in its first and its last MiB.
    """
    places = (0, nbytes - (1 << 20))
    done = 0
    while done < rounds:
        with started(kind, min(side_by_side, rounds - done)) as processes:
            for process in processes:
                assert process.ask("adopt", fd, extent=0, nbytes=nbytes) == {}
                for at in places:
                    found = process.ask("check", extent=0, seed=done, nbytes=1 << 20, at=at)
                    assert found == {"equal": True}, f"round {done} at {at}"
                    process.ask("fill", extent=0, seed=done + 1, nbytes=1 << 20, at=at)
                process.kill()
                done += 1
