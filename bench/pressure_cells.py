"""The cells of `kvstore bench pressure` that were measured, in a file: the grid is made in pieces, and on several GPUs.

Each cell is written as soon as it is there, beside those that are in the file by then, also by other processes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import describe, document
from bench.report import write_result
from kvstore.errors import InvalidArgument

__all__ = ["PressureCells"]


class PressureCells:
    """Cells of one kind of run, by name; without a file they are kept here alone."""

    def __init__(
        self, path: Path | None, device: str, sizes: Mapping[str, object], worker: Mapping[str, str]
    ) -> None:
        """Raises: InvalidArgument where the file has cells of other sizes or settings, or of another kind of device."""
        self._path = path
        head = {"device": device, "plan": sizes, "worker": worker}
        self._head: dict[str, Any] = json.loads(json.dumps(head))
        self._cells: dict[str, dict[str, Any]] = {}
        found = self._read()
        if found and _what_counts(found) != _what_counts(self._head):
            raise InvalidArgument(
                f"--out: {path} has cells of other sizes or settings, or another device: name another file"
            )
        self._take(found)

    def measured(self) -> set[str]:
        """Names of those that were measured; of what failed there is nothing."""
        self._take(self._read())
        return {name for name, cell in self._cells.items() if "error" not in cell}

    def add(self, cell: Mapping[str, Any]) -> None:
        """Keeps what was found of a cell, in place of what there was, with the commit that it came from."""
        with _alone(self._path):
            self._take(self._read())
            self._cells[cell["cell"]] = {**cell, "commit": describe().commit}
            if self._path is not None:
                write_result(self._path.stem, document(self.result()), self._path.parent)

    def result(self) -> dict[str, Any]:
        """The device, the sizes, and all cells."""
        return {**self._head, "cells": list(self._cells.values())}

    def _take(self, found: Mapping[str, Any]) -> None:
        self._cells |= {cell["cell"]: cell for cell in found.get("cells", ())}

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.is_file():
            return {}
        found = json.loads(self._path.read_text(encoding="utf-8"))["results"]
        assert isinstance(found, dict)
        return found


def _what_counts(head: Mapping[str, Any]) -> tuple[object, ...]:
    """What cells must have in common; of the device `cuda` of `cuda:1`."""
    return head["plan"], head.get("worker", {}), str(head["device"]).partition(":")[0]


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """No other process writes cells to that folder meanwhile."""
    if path is None:
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
