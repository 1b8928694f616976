"""Finds what a path holds at a start, in a child process: `python -m tiers.nvme.recover`.

A child, because LMDB reads a damaged file through a mapping and may be killed by it, and because a scan is work that
the daemon has no time for. The child reads the index; where that fails, or kills it, a second one scans the trailers
and writes a new index. What was found comes back through a memfd, so nothing is parsed twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import Corruption, KvstoreError, Unavailable
from tiers.nvme.cleared import read_cleared, without_cleared
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex, load_index, remove_index
from tiers.nvme.scan import keep_known, scan_slabs
from tiers.nvme.slab import list_slabs

__all__ = ["Recovered", "main", "recover"]

_INDEX_DAMAGED = 3  # exit code
_KILL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a path holds."""

    records: NDArray[np.void]  # RECORD[], by slab and slot
    rebuilt: str
    """Why the index was rebuilt from the trailers; empty where it was not."""


def recover(directory: Path, *, map_bytes: int, timeout_s: float) -> Recovered:
    """Blocks of a locked directory whose index nobody has open. Blocks without the GIL: call it in a thread.

    Raises Unavailable where it takes longer than `timeout_s` (a hung disk), KvstoreError where the scan fails too.
    """
    found = _run(directory, "index", map_bytes, timeout_s)
    if found.code == 0:
        return Recovered(records=found.records, rebuilt="")
    reason = found.text if found.code == _INDEX_DAMAGED else f"reading the index ended with {found.code}"
    found = _run(directory, "scan", map_bytes, timeout_s)
    if found.code != 0:
        raise KvstoreError(f"nvme: {directory} cannot be scanned: {found.text or f'exit code {found.code}'}")
    return Recovered(records=found.records, rebuilt=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    code: int
    text: str
    records: NDArray[np.void]


def _run(directory: Path, source: str, map_bytes: int, timeout_s: float) -> _Found:
    out = os.memfd_create("kvstore-recover", os.MFD_CLOEXEC)
    try:
        command = [sys.executable, "-m", __name__, str(directory), source, str(map_bytes), str(out)]
        child = subprocess.Popen(
            command,
            pass_fds=(out,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            if child.stdout is not None:
                child.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_KILL_S)  # one that hangs in the disk dies when the disk lets go of it, unattended
            raise Unavailable(f"nvme: {directory} was not read within {timeout_s:g} s") from None
        nbytes = os.fstat(out).st_size if child.returncode == 0 else 0
        records = np.frombuffer(os.pread(out, nbytes, 0) if nbytes else b"", dtype=RECORD)
        text = output.decode("utf-8", "replace").strip()
        return _Found(code=child.returncode, text=text, records=records)
    finally:
        os.close(out)


def main(arguments: list[str]) -> int:
    """The child: writes RECORD[] to the descriptor, or one line of what is wrong to its output."""
    parser = argparse.ArgumentParser(prog="kvstore-recover")
    parser.add_argument("directory", type=Path)
    parser.add_argument("source", choices=("index", "scan"))
    parser.add_argument("map_bytes", type=int)
    parser.add_argument("out", type=int)
    given = parser.parse_args(arguments)
    slabs = list_slabs(given.directory)
    try:
        if given.source == "index":
            records = keep_known(load_index(given.directory), slabs)
            records = without_cleared(records, read_cleared(given.directory))
        else:
            records = scan_slabs(given.directory, slabs)
            records = without_cleared(records, read_cleared(given.directory))
            remove_index(given.directory)
            index = DurableIndex(given.directory, map_bytes=given.map_bytes, durability=Durability.COMMIT)
            index.commit(records, np.empty(0, dtype=SLOT_REF))
            index.close()
    except Corruption as error:
        print(json.dumps(error.message)[1:-1])
        return _INDEX_DAMAGED
    with open(given.out, "wb", closefd=False) as out:
        out.write(records.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
