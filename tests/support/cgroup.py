"""A control group with a memory limit, below that of this process; its members are killed by nobody but the kernel."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cgroup", "NoCgroup", "limited"]


class NoCgroup(Exception):
    """None can be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group's folder."""

    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run as a member of the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    def killed(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                lines = (self.folder / name).read_text().split("\n")
                return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        raise AssertionError("the group counts no kills")

    def used_bytes(self) -> int:
        """Memory that its members have."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.folder / name).read_text())
        raise AssertionError("the group counts no memory")


@contextmanager
def limited(nbytes: int) -> Iterator[Cgroup]:
    """A group whose members have `nbytes` of memory together. Raises NoCgroup."""
    folder, limit = _parent()
    folder = folder / f"kvstore-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise NoCgroup(f"no group with a memory limit can be made in {folder.parent}: {error}") from None
    try:
        yield Cgroup(folder)
    finally:
        until = time.monotonic() + 10.0
        while folder.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # busy: its last member is just ending
                folder.rmdir()
            time.sleep(0.05)


def _parent() -> tuple[Path, str]:
    """The group of this process that has a memory controller, and what its limit is called."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= {name: path.lstrip("/") for name in controllers.split(",")}
    root = Path("/sys/fs/cgroup")
    for folder, limit in (
        (root / "memory" / own.get("memory", ""), "memory.limit_in_bytes"),
        (root / own.get("", ""), "memory.max"),
    ):
        if (folder / "cgroup.procs").exists():
            return folder, limit
    raise NoCgroup("this process is in no group with a memory controller")
