"""A small file system of a test's own, to be full, read-only or gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["tmpfs"]


@contextmanager
def tmpfs(place: Path, nbytes: int) -> Iterator[Path]:
    """A file system of `nbytes` in memory at `place`; skips where this process may not mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "kvstore-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here (uid {os.geteuid()}): {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
