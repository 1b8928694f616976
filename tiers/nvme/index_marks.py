"""The marks beside the file of an index, which say whether it is to be believed after a kill or a power cut.

`unsynced` names the boot of the machine in which the index is written without syncs, or says that it is being made
anew; `clean` says that it was closed in order.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import Corruption
from tiers.nvme.slab import sync_directory

__all__ = [
    "boot_id",
    "check_marks",
    "is_clean",
    "mark_clean",
    "mark_incomplete",
    "mark_synced",
    "mark_unsynced",
    "unmark_clean",
]

_UNSYNCED = "unsynced"
_CLEAN = "clean"
_INCOMPLETE = "incomplete"  # in the place of a boot: none has this name
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this boot of the machine: page cache that was not written yet is still there while it stays the same."""
    return _BOOT_ID.read_text(encoding="ascii")


def check_marks(folder: Path) -> None:
    """Raises Corruption for an index that was not made to its end, or written without syncs before a power cut."""
    mark = folder / _UNSYNCED
    if not mark.exists():
        return
    text = mark.read_text(encoding="ascii")
    if text == _INCOMPLETE:
        raise Corruption(f"{folder} was not made to its end")
    if text != boot_id():
        raise Corruption(f"{folder} was not flushed before the machine stopped")


def mark_unsynced(folder: Path) -> None:
    """It is believed as long as the machine stays on."""
    _write(folder / _UNSYNCED, boot_id())


def mark_incomplete(folder: Path) -> None:
    """It is not believed."""
    _write(folder / _UNSYNCED, _INCOMPLETE)


def mark_synced(folder: Path) -> None:
    """It is believed: what it says is on the medium."""
    (folder / _UNSYNCED).unlink(missing_ok=True)


def is_clean(folder: Path) -> bool:
    """Whether it was closed in order."""
    return (folder / _CLEAN).exists()


def mark_clean(folder: Path) -> None:
    """It is closed in order."""
    _write(folder / _CLEAN, "")


def unmark_clean(folder: Path) -> None:
    """From now on it may be behind."""
    if is_clean(folder):
        (folder / _CLEAN).unlink()
        sync_directory(folder)


def _write(file: Path, text: str) -> None:
    """Durable when it returns; whoever is killed meanwhile leaves what was there, or nothing that a boot is called."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode("ascii"))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(file.parent)
