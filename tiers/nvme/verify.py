"""Reads every block of a path that no service uses, and mends what can be mended. Blocks on the disk; for a command.

Memory: about 150 bytes a block of the index, and 4 MiB a thread (or one slot, where that is larger). The index is read
by a child, `python -m tiers.nvme.verify`: LMDB reads a damaged file through a mapping and may be killed by it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import ConfigError, Corruption, KvstoreError
from tiers.nvme.capacity import default_map_bytes
from tiers.nvme.cleared import read_cleared
from tiers.nvme.directory import read_secret
from tiers.nvme.fsck import (
    Entry,
    Finding,
    Trouble,
    findings_of_blocks,
    judge_files,
    judge_record,
    judge_records,
    judge_size,
)
from tiers.nvme.index import (
    CUT_SHORT,
    RECORD,
    SLOT_REF,
    DurableIndex,
    OtherFormatError,
    load_index,
)
from tiers.nvme.notes import SizeNote, read_budget, read_size
from tiers.nvme.scan import scan_slabs
from tiers.nvme.slab import SlabFile, slab_file, stride_bytes, sync_directory
from tiers.nvme.trailer import checksum, read_trailer

__all__ = ["Examination", "examine", "main", "mend"]

Progress = Callable[[int, int], None]
"""Is told of blocks that were read and of blocks in all."""

_RUN_BYTES = 4 << 20
_DAMAGED = 3  # exit code of the child


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found."""

    directory: Path
    findings: tuple[Finding, ...]
    records: NDArray[np.void]  # RECORD[n] that were looked at
    troubles: NDArray[np.uint8]  # [n] Trouble of each
    entries: tuple[Entry, ...]
    verified_bytes: int
    index_usable: bool

    @property
    def sound_blocks(self) -> int:
        """Blocks that are what was written."""
        return int(np.count_nonzero(self.troubles == Trouble.NONE))


def examine(
    directory: Path, *, capacity_bytes: int | None, threads: int, progress: Progress = lambda *_: None
) -> Examination:
    """Looks at everything in a locked path and changes nothing. `capacity_bytes` None: not known.

    Raises KvstoreError, OSError where the path itself cannot be read.
    """
    entries = tuple(_entries(directory))
    slabs = [file for entry in entries if (file := slab_file(entry.name, entry.nbytes)) is not None]
    findings = judge_files(entries, directory.stat().st_uid)
    notes, sized = _notes(directory)
    if capacity_bytes is not None:
        resized = sized is not None and sized.configured_bytes == capacity_bytes
        findings += judge_size(entries, sized.resized_bytes if sized and resized else capacity_bytes)
    findings += notes
    findings += _small_files(directory, with_blocks=bool(slabs))
    records, damage = _read_index(directory)
    if damage is not None:
        records = scan_slabs(directory, slabs)
        if slabs or "does not exist" not in damage:
            mend_text = "rebuilds it from the trailers of the slabs"
            findings.append(Finding(trouble=Trouble.INDEX, places=("index",), text=damage, mend=mend_text))
    troubles = judge_records(records, slabs)
    _verify(directory, slabs, records, troubles, threads, progress)
    return Examination(
        directory=directory,
        findings=(*findings, *findings_of_blocks(records, troubles)),
        records=records,
        troubles=troubles,
        entries=entries,
        verified_bytes=int(records["length"][troubles != Trouble.NO_SLOT].sum(dtype=np.uint64)),
        index_usable=damage is None,
    )


def _entries(directory: Path) -> Iterator[Entry]:
    yield _entry(directory, ".")
    for folder, folders, files in os.walk(directory):
        for name in sorted((*folders, *files)):
            path = Path(folder, name)
            if name != "lost+found":
                yield _entry(path, str(path.relative_to(directory)))


def _entry(path: Path, name: str) -> Entry:
    status = path.stat(follow_symlinks=False)
    return Entry(
        name=name,
        mode=status.st_mode,
        uid=status.st_uid,
        nbytes=status.st_size,
        allocated_bytes=status.st_blocks * 512,
    )


def _small_files(directory: Path, *, with_blocks: bool) -> list[Finding]:
    found = []
    try:
        if read_secret(directory) is None and with_blocks:
            raise ConfigError(
                "the file is gone, and without it no block can be found again: put it back from a copy"
            )
    except ConfigError as error:
        found.append(Finding(trouble=Trouble.SECRET, places=("secret",), text=error.message, mend=""))
    try:
        read_cleared(directory)
    except Corruption as error:
        found.append(Finding(trouble=Trouble.CLEARED, places=("cleared",), text=error.message, mend=""))
    return found


def _notes(directory: Path) -> tuple[list[Finding], SizeNote | None]:
    """What is wrong with the notes that outlive a service, and the size that it was given at run time."""
    found: list[Finding] = []
    sized: SizeNote | None = None
    try:
        sized = read_size(directory)
    except Corruption as error:
        mends = "deletes it: the configured size counts"
        found.append(Finding(trouble=Trouble.NOTE, places=("size",), text=error.message, mend=mends))
    try:
        read_budget(directory)
    except Corruption as error:
        mends = "deletes it: nothing of today's budget counts as spent"
        found.append(Finding(trouble=Trouble.NOTE, places=("budget",), text=error.message, mend=mends))
    return found, sized


# ------------------------------------------------------------ the index


def _read_index(directory: Path) -> tuple[NDArray[np.void], str | None]:
    """RECORD[] of the index, and None; or none of them, and what is wrong with it."""
    out = os.memfd_create("kvstore-verify", os.MFD_CLOEXEC)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(directory), str(out)],
            pass_fds=(out,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            nbytes = os.fstat(out).st_size
            return np.frombuffer(os.pread(out, nbytes, 0) if nbytes else b"", dtype=RECORD), None
        said = done.stdout.strip() if done.returncode == _DAMAGED else ""
        return np.empty(0, dtype=RECORD), said or CUT_SHORT
    finally:
        os.close(out)


def main(arguments: list[str]) -> int:
    """The child: RECORD[] of a folder's index into a descriptor, or one line of what is wrong with it."""
    try:
        records = load_index(Path(arguments[0]))
    except OtherFormatError as error:
        print(error.what)
        return _DAMAGED
    except KvstoreError as error:
        print(" ".join(str(error).split()))
        return _DAMAGED
    with open(int(arguments[1]), "wb", closefd=False) as file:
        file.write(records.tobytes())
    return 0


# ------------------------------------------------------------ the blocks


@dataclass(frozen=True, slots=True)
class _Run:
    """Slots that lie side by side."""

    slot_bytes: int
    fd: int
    chosen: NDArray[np.intp]  # positions of their records, by slot


def _verify(
    directory: Path,
    slabs: Sequence[SlabFile],
    records: NDArray[np.void],
    troubles: NDArray[np.uint8],
    threads: int,
    progress: Progress,
) -> None:
    """Reads every block whose slot is there, and notes the trouble of each."""
    local = threading.local()
    done, total = 0, int(np.count_nonzero(troubles != Trouble.NO_SLOT))

    def verify(run: _Run) -> int:
        _verify_run(run, records, troubles, local)
        return len(run.chosen)

    progress(0, total)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
        for file in slabs:
            here = np.flatnonzero((records["slab"] == file.number) & (troubles != Trouble.NO_SLOT))
            if not len(here):
                continue
            try:
                fd = _open(directory / file.name)
            except OSError:
                troubles[here] = Trouble.UNREADABLE
                done += len(here)
                continue
            stack.callback(os.close, fd)
            here = here[np.argsort(records["slot"][here], kind="stable")]
            for count in pool.map(verify, _runs(file, fd, here, records["slot"][here])):
                done += count
                progress(done, total)


def _runs(file: SlabFile, fd: int, chosen: NDArray[np.intp], slots: NDArray[np.uint32]) -> list[_Run]:
    most = max(1, _RUN_BYTES // stride_bytes(file.slot_bytes))
    breaks = np.flatnonzero(np.diff(slots.astype(np.int64)) != 1) + 1
    return [
        _Run(file.slot_bytes, fd, part[at : at + most])
        for part in np.split(chosen, breaks)
        for at in range(0, len(part), most)
    ]


def _verify_run(
    run: _Run, records: NDArray[np.void], troubles: NDArray[np.uint8], local: threading.local
) -> None:
    stride = stride_bytes(run.slot_bytes)
    buffer = _buffer(local, max(_RUN_BYTES, stride))
    first = int(records["slot"][run.chosen[0]])
    have = _read(run.fd, buffer[: len(run.chosen) * stride], first * stride)
    for at, position in enumerate(run.chosen.tolist()):
        slot = buffer[at * stride : (at + 1) * stride]
        # After an error or at the end of the file each is read alone.
        if (at + 1) * stride > have and _read(run.fd, slot, (first + at) * stride) < stride:
            troubles[position] = Trouble.UNREADABLE
            continue
        payload, page = slot[: run.slot_bytes], slot[run.slot_bytes :]
        trouble = judge_record(records[position], read_trailer(page), checksum(payload))
        if trouble is not Trouble.NONE:
            troubles[position] = trouble


def _read(fd: int, buffer: memoryview, offset: int) -> int:
    """Bytes read; 0 where the disk gives none."""
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError:
        return 0


def _buffer(local: threading.local, nbytes: int) -> memoryview:
    """This thread's, page-aligned."""
    buffer: memoryview | None = getattr(local, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = local.buffer = memoryview(mmap.mmap(-1, nbytes))
    return buffer


def _open(path: Path) -> int:
    """For reading only; past the page cache where the file system can."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, flags)


# ------------------------------------------------------------ mending


def mend(found: Examination) -> tuple[Finding, ...]:
    """Mends what can be; the findings again, those that are mended marked. Raises KvstoreError, OSError."""
    findings = [_mend_file(found.directory, finding) for finding in found.findings]
    sync_directory(found.directory)
    of_index = [finding for finding in findings if _is_of_index(finding)]
    if of_index:
        _mend_index(found)
    return tuple(replace(finding, mended=True) if _is_of_index(finding) else finding for finding in findings)


def _is_of_index(finding: Finding) -> bool:
    return finding.trouble <= Trouble.DUPLICATE or finding.trouble is Trouble.INDEX


def _mend_file(directory: Path, finding: Finding) -> Finding:
    path = directory / finding.places[0]
    if finding.trouble is Trouble.MODE:
        if path.exists():  # it was not a leftover
            path.chmod(0o700 if path.is_dir() else 0o600)
    elif finding.trouble in (Trouble.LEFTOVER, Trouble.NOTE):
        path.unlink(missing_ok=True)
    elif finding.trouble is Trouble.SPARSE:
        try:
            _allocate(path)
        except OSError:
            return replace(finding, mend="cannot: the disk has no room for it")
    else:
        return finding
    return replace(finding, mended=True)


def _allocate(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _mend_index(found: Examination) -> None:
    """Bad blocks leave the index, and their trailers the slabs, so that no scan brings them back."""
    bad = found.troubles != Trouble.NONE
    spoilt = (found.troubles == Trouble.CHECKSUM) | (found.troubles == Trouble.NO_TRAILER)
    _spoil_trailers(found.directory, found.records[spoilt])
    slab_bytes = sum(entry.nbytes for entry in found.entries if entry.name.endswith(".kv"))
    index_bytes = sum(entry.nbytes for entry in found.entries if entry.name.endswith(".mdb"))
    published = np.empty(0, dtype=RECORD)
    freed = np.zeros(int(bad.sum()), dtype=SLOT_REF)
    freed["slab"], freed["slot"] = found.records["slab"][bad], found.records["slot"][bad]
    make: Callable[..., DurableIndex] = DurableIndex
    if not found.index_usable:
        make = DurableIndex.anew
        published, freed = found.records[~bad], freed[:0]
    index = make(
        found.directory,
        map_bytes=max(default_map_bytes(slab_bytes), index_bytes),
        durability=Durability.POWER,
    )
    try:
        index.commit(published, freed)
        index.complete()
    finally:
        index.close()


def _spoil_trailers(directory: Path, records: NDArray[np.void]) -> None:
    """A trailer behind bytes that are not its own would be believed by a start that scans."""
    for number in np.unique(records["slab"]).tolist():
        here = records[records["slab"] == number]
        slot_bytes = int(here["length"][0])
        name = SlabFile(number=number, slot_bytes=slot_bytes, nbytes=0).name
        fd = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        stride = stride_bytes(slot_bytes)
        try:
            for slot in here["slot"].tolist():
                with contextlib.suppress(OSError):  # a sector that cannot be written is no trailer either
                    os.pwrite(fd, bytes(stride - slot_bytes), slot * stride + slot_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
