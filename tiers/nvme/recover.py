"""Finds what a path holds at a start, in a child process: `python -m tiers.nvme.recover`.

A child, because LMDB reads a damaged file through a mapping and may be killed by it, and because this is work that the
daemon has no time for. It reads the index; where that fails, or kills it, a second one scans the trailers and writes a
new index first. Then parent and child speak in lines of JSON, each side one at a time:

    child   {"groups": groups of the index, "clean": whether it was closed in order}
    child   {"used": {slab: blocks}, "last_uses": {slab: touch}, "newest_ms": n, "digests": [namespaces], "blocks": n,
             "strays": n, "damaged": n}
    parent  a `LoadPlan`, and what it calls the namespaces; or the end of file, and the child ends
    child   {"columns": n}       hash, namespace, depth and touch of all rows are in the memory that both have
    child   {"built": n}         everything is
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import ConfigError, Corruption, KvstoreError, Unavailable
from kvstore.tables.prebuilt import LoadPlan, SlabSlots, prebuilt_bytes
from tiers.nvme.building import Pick, Survey, build, chunks_of, extremes, survey
from tiers.nvme.cleared import read_cleared
from tiers.nvme.index import (
    CUT_SHORT,
    SLOT_REF,
    DurableIndex,
    IndexReader,
    index_file_bytes,
    load_index,
)
from tiers.nvme.scan import differing, keep_known, scan_slabs
from tiers.nvme.slab import SlabFile, list_slabs

__all__ = ["Found", "FoundBlocks", "FoundByChild", "FoundRecords", "main", "recover"]

_INDEX_DAMAGED, _REFUSED = 3, 4  # exit codes
_KILL_S = 1.0
_LOOKED_AT = 2048  # blocks at each end, where the index was not closed in order: 0.1 s of a disk
_FEW_WRONG, _WRONG_SHARE = 64, 4  # one group commit may be behind: more, and a quarter, is not a kill's doing
_NICENESS = 5  # what is being served goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBlocks:
    """What a path holds, in numbers."""

    used: Mapping[int, int]
    """Blocks of each slab that has any."""
    last_uses: Mapping[int, int]
    """Median of the touches of each slab that has any block."""
    newest_ms: int
    """The last use of any block, or the last clear, whichever is later; 0 where there was none."""
    digests: tuple[bytes, ...]
    blocks: int
    strays: int
    """Records of slots that do not exist, which are passed over."""
    damaged: int
    """Blocks whose trailer is not what the index says, which are passed over."""
    clean: bool
    """Whether the index was closed in order."""
    rebuilt: str
    """Why the index was rebuilt from the trailers; empty where it was not."""


class Found(Protocol):
    """What a path holds, and how its tables are built: `build_columns`, then `build_rest`; at the end `close`."""

    @property
    def blocks(self) -> FoundBlocks:
        """In numbers."""
        ...

    def build_columns(self, plan: LoadPlan, handles: Mapping[bytes, int]) -> memoryview:
        """The memory, in which hash, namespace, depth and touch of the rows are. Blocks. Raises KvstoreError."""
        ...

    def build_rest(self) -> int:
        """Everything is there now; returns how many blocks. Blocks. Raises KvstoreError."""
        ...

    def close(self) -> None:
        """Nothing of it is needed any more, the memory neither."""
        ...


class FoundRecords:
    """RECORD[] by slab and slot that are in memory already, in `slabs`. Implements Found."""

    def __init__(
        self,
        records: NDArray[np.void],
        slabs: Sequence[SlabFile],
        cleared: Mapping[bytes, int],
        *,
        rebuilt: str = "",
    ) -> None:
        self._chunks = chunks_of(records)
        self._pick = Pick.of(slabs, cleared)
        self._survey = survey(self._chunks, self._pick)
        self.blocks = _in_numbers(self._survey, damaged=0, clean=True, rebuilt=rebuilt)
        self._finish: Callable[[], int] = int

    def build_columns(self, plan: LoadPlan, handles: Mapping[bytes, int]) -> memoryview:
        """See Found."""
        memory = memoryview(bytearray(prebuilt_bytes(plan)))
        builder = build(self._chunks, self._pick, self._survey, plan, handles, memory)
        self._finish = builder.finish
        return memory

    def build_rest(self) -> int:
        """See Found."""
        return self._finish()

    def close(self) -> None:
        """See Found."""


class FoundByChild:
    """A child has the index open and waits to be told. Implements Found; one thread at a time."""

    def __init__(self, child: _Child, blocks: FoundBlocks) -> None:
        self._child = child
        self.blocks = blocks

    def build_columns(self, plan: LoadPlan, handles: Mapping[bytes, int]) -> memoryview:
        """See Found."""
        named = {digest.hex(): handle for digest, handle in handles.items()}
        self._child.tell({"plan": asdict(plan), "handles": named})
        self._hear("columns")
        return self._child.memory(prebuilt_bytes(plan))

    def build_rest(self) -> int:
        """See Found."""
        return int(self._hear("built")["built"])

    def _hear(self, what: str) -> dict[str, Any]:
        try:
            return self._child.hear(what)
        except _ChildFailedError as error:
            raise KvstoreError(
                f"nvme: the child that reads the index ended with {error.code}: {error}"
            ) from None

    def close(self) -> None:
        """See Found."""
        self._child.close()


class _ChildFailedError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class _Child:
    """The process, its two pipes and the memory that both have."""

    def __init__(self, directory: Path, source: str, map_bytes: int, timeout_s: float) -> None:
        self._directory, self._timeout_s = directory, timeout_s
        self._out = os.memfd_create("kvstore-recover", os.MFD_CLOEXEC)
        command = [sys.executable, "-m", __name__, str(directory), source, str(map_bytes), str(self._out)]
        self._process = subprocess.Popen(
            command,
            pass_fds=(self._out,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._unread = b""

    def tell(self, message: Mapping[str, object]) -> None:
        """One line to it; one that is gone is noticed by `hear`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._process.stdin.flush()

    def hear(self, what: str) -> dict[str, Any]:
        """The next line, which has a key `what`.

        Raises Unavailable where none comes in time, _ChildFailedError where the child ended.
        """
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], self._timeout_s)
            if not ready:
                self.close()
                raise Unavailable(f"nvme: {self._directory} was not read within {self._timeout_s:g} s")
            read = os.read(fd, 1 << 16)
            if not read:
                code = self._process.wait()
                self.close()
                raise _ChildFailedError(code, self._unread.decode("utf-8", "replace").strip())
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {}
        if what not in message:
            code = self._process.wait()
            self.close()
            raise _ChildFailedError(code, line.decode("utf-8", "replace").strip())
        return message

    def memory(self, nbytes: int) -> memoryview:
        """What it has filled."""
        return memoryview(mmap.mmap(self._out, nbytes, prot=mmap.PROT_READ))

    def close(self) -> None:
        """Ends it; what was mapped stays."""
        if self._out < 0:
            return
        os.close(self._out)
        self._out = -1
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(
                _KILL_S
            )  # one that hangs in the disk dies when the disk lets go of it, unattended


def recover(directory: Path, *, map_bytes: int, timeout_s: float, scan: bool = True) -> FoundByChild:
    """Blocks of a locked directory whose index nobody has open. Blocks without the GIL: call it in a thread.

    `scan`: an index that cannot be believed is made anew from the trailers. Raises Unavailable where it takes longer
    than `timeout_s` (a hung disk), ConfigError where the index is of another version, or damaged and not to be made
    anew, KvstoreError where the scan fails too.
    """
    try:
        return _found(directory, "index", map_bytes, timeout_s, rebuilt="")
    except _ChildFailedError as error:
        if error.code == _REFUSED:
            raise ConfigError(error.text) from None
        reason = error.text if error.code == _INDEX_DAMAGED else f"the index {CUT_SHORT}"
    if not scan:
        raise ConfigError(
            f"nvme: {directory}: {reason}; recovery is strict: run `kvstore fsck --repair {directory}`, or start with "
            "--recovery quiet"
        )
    try:
        return _found(directory, "scan", map_bytes, timeout_s, rebuilt=reason)
    except _ChildFailedError as error:
        raise KvstoreError(
            f"nvme: {directory} cannot be scanned: {error.text or f'exit code {error.code}'}"
        ) from None


def _found(directory: Path, source: str, map_bytes: int, timeout_s: float, *, rebuilt: str) -> FoundByChild:
    child = _Child(directory, source, map_bytes, timeout_s)
    index = child.hear("groups")
    told = child.hear("used")
    return FoundByChild(
        child,
        FoundBlocks(
            used={int(slab): int(blocks) for slab, blocks in told["used"].items()},
            last_uses={int(slab): int(touch) for slab, touch in told["last_uses"].items()},
            newest_ms=int(told["newest_ms"]),
            digests=tuple(bytes.fromhex(digest) for digest in told["digests"]),
            blocks=int(told["blocks"]),
            strays=int(told["strays"]),
            damaged=int(told["damaged"]),
            clean=bool(index["clean"]),
            rebuilt=rebuilt,
        ),
    )


def _in_numbers(found: Survey, *, damaged: int, clean: bool, rebuilt: str) -> FoundBlocks:
    return FoundBlocks(
        used=found.used,
        last_uses=found.last_uses,
        newest_ms=found.newest_ms,
        digests=found.digests,
        blocks=found.blocks,
        strays=found.strays,
        damaged=damaged,
        clean=clean,
        rebuilt=rebuilt,
    )


# ------------------------------------------------------------ the child


def main(arguments: list[str]) -> int:
    """The child: see the module. Says in one line what is wrong where it ends before its time."""
    parser = argparse.ArgumentParser(prog="kvstore-recover")
    parser.add_argument("directory", type=Path)
    parser.add_argument("source", choices=("index", "scan"))
    parser.add_argument("map_bytes", type=int)
    parser.add_argument("out", type=int)
    given = parser.parse_args(arguments)
    os.nice(_NICENESS)
    try:
        slabs = list_slabs(given.directory)
        if given.source == "scan":
            _write_anew(given.directory, scan_slabs(given.directory, slabs), given.map_bytes)
        elif (
            index_file_bytes(given.directory) > given.map_bytes
        ):  # of a larger capacity: LMDB gives nothing back
            _write_anew(given.directory, keep_known(load_index(given.directory), slabs), given.map_bytes)
        with IndexReader(given.directory) as reader:
            _say({"groups": reader.groups, "clean": reader.clean})
            pick = Pick.of(slabs, read_cleared(given.directory))
            if not reader.clean:
                pick = replace(pick, damaged=_look_closer(reader, pick, given.directory, slabs))
            _answer(reader, pick, given.out)
    except Corruption as error:
        print(_line(error))
        return _INDEX_DAMAGED
    except ConfigError as error:
        print(_line(error))
        return _REFUSED
    return 0


def _line(error: KvstoreError) -> str:
    return json.dumps(error.message)[1:-1]


def _write_anew(directory: Path, records: NDArray[np.void], map_bytes: int) -> None:
    index = DurableIndex.anew(directory, map_bytes=map_bytes, durability=Durability.POWER)
    index.commit(records, np.empty(0, dtype=SLOT_REF))
    index.complete()
    index.close()


def _look_closer(
    reader: IndexReader, pick: Pick, directory: Path, slabs: Sequence[SlabFile]
) -> frozenset[tuple[int, int]]:
    """(slab, slot) of records that a kill has left behind, of those where it would: used last, or about to be evicted.

    Raises Corruption where so many are wrong that no kill explains it: then the slabs are believed.
    """
    looked_at = extremes(reader.chunks, pick, _LOOKED_AT)
    wrong = looked_at[differing(directory, slabs, looked_at)]
    if len(wrong) > max(_FEW_WRONG, len(looked_at) // _WRONG_SHARE):
        raise Corruption(f"{len(wrong)} of {len(looked_at)} blocks of the index are not in their slots")
    return frozenset(zip(wrong["slab"].tolist(), wrong["slot"].tolist(), strict=True))


def _answer(reader: IndexReader, pick: Pick, out: int) -> None:
    found = survey(reader.chunks, pick)
    _say(
        {
            "used": found.used,
            "last_uses": found.last_uses,
            "newest_ms": found.newest_ms,
            "digests": [digest.hex() for digest in found.digests],
            "blocks": found.blocks,
            "strays": found.strays,
            "damaged": len(pick.damaged),
        }
    )
    line = sys.stdin.readline()
    if not line:
        return
    told = json.loads(line)
    plan = _plan(told["plan"])
    os.ftruncate(out, prebuilt_bytes(plan))
    memory = memoryview(mmap.mmap(out, 0))
    handles = {bytes.fromhex(digest): int(handle) for digest, handle in told["handles"].items()}
    builder = build(reader.chunks, pick, found, plan, handles, memory)
    _say({"columns": found.blocks})
    _say({"built": builder.finish()})


def _plan(told: Mapping[str, Any]) -> LoadPlan:
    return LoadPlan(
        runs=tuple((int(first), int(count)) for first, count in told["runs"]),
        slabs=tuple(SlabSlots(**slab) for slab in told["slabs"]),
        buckets=int(told["buckets"]),
        latest_touch=int(told["latest_touch"]),
    )


def _say(message: Mapping[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
