"""Two small files beside the slabs that outlive every process: what a path was resized to, and what it has written.

    size      `<configured> <resized>`, bytes: the size that was asked for while the configuration said the first
    budget    `<debt> <ms>`: bytes of the write budget that are spent, as of that wall clock

Each is one line, written anew under another name and renamed. One caller at a time; all calls block on the disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import Corruption
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.slab import sync_directory

__all__ = ["BudgetNote", "SizeNote", "read_budget", "read_size", "remove_size", "write_budget", "write_size"]

_SIZE = "size"
_BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeNote:
    """A size that was given at run time, and what the configuration said then."""

    configured_bytes: int
    resized_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetNote:
    """Spent bytes of a write budget, as of a time."""

    debt_bytes: int
    at_ms: int


def read_size(directory: Path, disk: Disk = SYSTEM_DISK) -> SizeNote | None:
    """What the path was resized to; None where it was not. Raises Corruption."""
    numbers = _read(directory / _SIZE, disk)
    return None if numbers is None else SizeNote(configured_bytes=numbers[0], resized_bytes=numbers[1])


def write_size(directory: Path, note: SizeNote, disk: Disk = SYSTEM_DISK) -> None:
    """Durable when it returns. Raises OSError."""
    _write(directory / _SIZE, (note.configured_bytes, note.resized_bytes), disk)


def remove_size(directory: Path, disk: Disk = SYSTEM_DISK) -> None:
    """The configuration counts again. Raises OSError."""
    if disk.exists(directory / _SIZE):
        disk.unlink(directory / _SIZE)
        sync_directory(directory, disk)


def read_budget(directory: Path, disk: Disk = SYSTEM_DISK) -> BudgetNote | None:
    """What was spent; None where nothing was. Raises Corruption."""
    numbers = _read(directory / _BUDGET, disk)
    return None if numbers is None else BudgetNote(debt_bytes=numbers[0], at_ms=numbers[1])


def write_budget(directory: Path, note: BudgetNote, disk: Disk = SYSTEM_DISK) -> None:
    """Durable when it returns. Raises OSError."""
    _write(directory / _BUDGET, (note.debt_bytes, note.at_ms), disk)


def _read(file: Path, disk: Disk) -> tuple[int, int] | None:
    try:
        words = disk.read_file(file).decode("ascii").split()
        first, second = (int(word) for word in words)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Corruption(f"{file} cannot be read, or is damaged: {error}; delete it") from error
    if min(first, second) < 0:
        raise Corruption(f"{file} is damaged: a number in it is negative; delete it")
    return first, second


def _write(file: Path, numbers: tuple[int, int], disk: Disk) -> None:
    unfinished = file.with_name(f"{file.name}.new")
    fd = disk.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        disk.write(fd, f"{numbers[0]} {numbers[1]}\n".encode("ascii"))
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(unfinished, file)
    sync_directory(file.parent, disk)
