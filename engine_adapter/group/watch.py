"""Ends this process when a member of its model has died: none of its steps can be completed any more.

A step that waits for the sums of a dead process waits in the driver, where nothing interrupts it, so the process ends
itself. Nothing is lost: blocks that are sealed stay in HBM and DRAM, those that are being filled are nobody's hit.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["end_process", "watched"]

_EXIT_STATUS = 1


@contextmanager
def watched(pids: Mapping[int, int], on_death: Callable[[str], object]) -> Iterator[None]:
    """While it lasts, the first member to end has `on_death` called, on a thread of ours, with one line.

    `pids`: of the members that are children of this process, by their number. Their exit status is left to whoever
    started them.
    """
    poller = select.poll()
    numbers = {}
    with contextlib.ExitStack() as stack:
        for number, pid in pids.items():
            fd = os.pidfd_open(pid)
            stack.callback(os.close, fd)
            numbers[fd] = number
            poller.register(fd, select.POLLIN)
        woken, wake = os.pipe()
        stack.callback(os.close, woken)
        poller.register(woken, select.POLLIN)
        thread = threading.Thread(
            target=_watch, args=(poller, numbers, pids, on_death), name="kvstore-group-watch", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            os.close(wake)  # the other end becomes readable
            thread.join()


def _watch(
    poller: select.poll,
    numbers: Mapping[int, int],
    pids: Mapping[int, int],
    on_death: Callable[[str], object],
) -> None:
    for fd, _ in poller.poll():
        if fd in numbers:
            number = numbers[fd]
            on_death(f"process {number} of the model (pid {pids[number]}) has ended: the worker ends with it")
            return


def end_process(why: str) -> NoReturn:
    """Says why in one line and ends this process at once."""
    os.write(sys.stderr.fileno(), f"kvstore: {why}\n".encode())
    os._exit(_EXIT_STATUS)
