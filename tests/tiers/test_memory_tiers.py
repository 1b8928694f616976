"""The contract of MemoryTier, run by DRAM and the HBM twin; seals; what happens when memory is short."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from tiers import memfd
from tiers.dram import DramTier
from tiers.memfd import MemfdTier, available_memory_bytes, create_extent, create_memfd, map_memory, unmap
from tiers.twin import TwinTier

MIB = 1 << 20


@pytest.fixture(params=["dram", "twin"])
def tier(request: pytest.FixtureRequest) -> Iterator[MemfdTier]:
    made: MemfdTier
    match request.param:
        case "dram":
            made = DramTier()
        case _:
            made = TwinTier(64 * MIB)
    yield made
    made.close()


def test_a_new_extent_is_zeros_and_writable(tier: MemfdTier) -> None:
    tier.create(2, MIB)
    view = np.frombuffer(tier.view(2), dtype=np.uint8)
    assert not view.any()
    view[:] = 7
    assert tier.view(2)[MIB - 1] == 7


def test_two_processes_views_are_one_memory(tier: MemfdTier) -> None:
    fd = tier.create(0, MIB)
    other = DramTier()
    other.adopt(5, os.dup(fd), MIB)
    other.view(5)[100] = 9
    assert tier.view(0)[100] == 9
    with pytest.raises(NotFound):
        other.descriptor(5)
    other.close()
    assert tier.view(0)[100] == 9


def test_addresses_are_where_the_bytes_are(tier: MemfdTier) -> None:
    tier.create(1, MIB)
    tier.create(200, MIB)
    extents = np.array([200, 1, 200], dtype=np.uint16)
    offsets = np.array([0, 4096, 8192], dtype=np.uint64)
    addresses = tier.addresses(extents, offsets)
    for extent, offset, address in zip(extents.tolist(), offsets.tolist(), addresses.tolist(), strict=True):
        tier.view(extent)[offset] = 200 + offset // 4096
        assert ctypes.c_ubyte.from_address(address).value == 200 + offset // 4096
    assert len(tier.addresses(extents[:0], offsets[:0])) == 0
    for missing in (7, 60000):
        with pytest.raises(NotFound):
            tier.addresses(np.array([1, missing], dtype=np.uint16), offsets[:2])


def test_drop_forgets_and_the_number_can_come_again(tier: MemfdTier) -> None:
    fd = tier.create(1, MIB)
    tier.view(1)[0] = 5
    with pytest.raises(AlreadyExists):
        tier.create(1, MIB)
    tier.drop(1)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    for use in (tier.view, tier.drop, tier.descriptor, tier.address):
        with pytest.raises(NotFound):
            use(1)
    tier.create(1, MIB)
    assert tier.view(1)[0] == 0


def test_nobody_can_resize_an_extent(tier: MemfdTier) -> None:
    """A client that cut an extent short killed the daemon with SIGBUS."""
    fd = tier.create(0, MIB)
    for nbytes in (0, 4096, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def _bad_memfd(kind: str) -> int:
    if kind == "file":
        return os.open("/dev/null", os.O_RDWR)
    if kind == "short":
        return create_memfd("t", MIB // 2)
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    if kind == "sparse":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize("kind", ["file", "short", "unsealed", "sparse"])
def test_memory_that_could_raise_sigbus_is_not_adopted(tier: MemfdTier, kind: str) -> None:
    """A worker's extent that was sparse or not sealed could kill whoever touched it."""
    fd = _bad_memfd(kind)
    with pytest.raises(InvalidArgument):
        tier.adopt(0, fd, MIB)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert tier.extents() == {}


@pytest.mark.parametrize("nbytes", [0, -4096, 100])
def test_an_extent_is_whole_pages(tier: MemfdTier, nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        tier.create(0, nbytes)


def test_more_than_there_is_is_a_clean_error(tier: MemfdTier) -> None:
    """An extent larger than memory was made sparse and killed the daemon when it was filled."""
    with pytest.raises(ResourceExhausted, match="not enough memory"):
        tier.create(0, 1 << 50)
    assert tier.extents() == {}


def test_memory_that_ends_while_it_is_taken_is_a_clean_error() -> None:
    """SIGBUS came when memory was short at the first touch instead of an error when it was asked for."""
    script = """
import resource
from kvstore.errors import ResourceExhausted
from tiers.dram import DramTier
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tier = DramTier()
try:
    tier.create(0, 1 << 22)
except ResourceExhausted as error:
    print(error)
tier.create(0, 1 << 20)
tier.view(0)[:] = bytes(1 << 20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "not enough memory for 4MiB" in done.stdout


def _cgroup(folder: Path, *, most: str, used: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 200000\nactive_file 100000\n")


def test_the_cgroup_counts(tmp_path: Path) -> None:
    _cgroup(tmp_path, most="1000000", used=900000)
    assert available_memory_bytes(tmp_path, tmp_path) == 400000
    _cgroup(tmp_path, most="max", used=900000)
    assert available_memory_bytes(tmp_path, tmp_path) > 400000


@pytest.mark.parametrize("limited", ["slice", "service", "neither"])
def test_a_cgroup_above_the_process_counts(tmp_path: Path, limited: str) -> None:
    """Only the limit of the hierarchy's root was read: under systemd the service took more and was killed for it."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("1:cpu:/elsewhere\n0::/a.slice/b.service\n")
    root = tmp_path / "root"
    for folder, name in (
        (root, "root"),
        (root / "a.slice", "slice"),
        (root / "a.slice/b.service", "service"),
    ):
        _cgroup(folder, most="1000000" if name == limited else "max", used=900000)
    assert (available_memory_bytes(tmp_path, root) == 400000) == (limited != "neither")


def test_an_extent_leaves_memory_for_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last extent took the last page, and the kernel killed the daemon at its next allocation."""
    monkeypatch.setattr(memfd, "available_memory_bytes", lambda: 65 * MIB)
    os.close(create_memfd("fits", MIB))
    with pytest.raises(ResourceExhausted, match="64MiB of it stays free"):
        create_memfd("does not", 2 * MIB)


def test_an_extent_has_huge_pages_and_is_mapped_as_such() -> None:
    """Pages of 4 KiB cost the disk half of its rate: nobody had asked for others."""
    tier = DramTier()
    nbytes = 5 * MIB  # two huge pages and a half
    tier.create(0, nbytes)
    tier.populate(0)
    assert tier.address(0) % (2 * MIB) == 0
    huge = _shmem_huge_bytes(tier.address(0))
    tier.close()
    if not huge and not _collapses():
        pytest.skip("this kernel makes no huge pages of a memfd")
    assert huge == 4 * MIB


def test_an_extent_is_whole_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_MADV_COLLAPSE", 9999)  # EINVAL, as of a kernel before 6.1
    fd = create_extent("small pages", 5 * MIB)
    assert os.fstat(fd).st_blocks * 512 == 5 * MIB
    os.close(fd)


def test_a_mapping_leaves_nothing_of_its_reserve() -> None:
    before = _mappings()
    fd = create_extent("mapped", 5 * MIB)
    address = map_memory(fd, 5 * MIB)
    unmap(address, 5 * MIB)
    os.close(fd)
    assert _mappings() == before


def test_descriptors_and_memory_do_not_leak(tier: MemfdTier) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(50):
        tier.create(0, MIB)
        tier.populate(0)
        tier.drop(0)
    assert count() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


def test_twin_extents_lie_back_to_back() -> None:
    """A device's pages must be one strided array, or attention needs a pointer a page."""
    twin = TwinTier(16 * MIB)
    for extent in (4, 2, 9):
        twin.create(extent, 2 * MIB)
    assert [twin.offset(extent) for extent in (4, 2, 9)] == [0, 2 * MIB, 4 * MIB]
    assert twin.address(9) == twin.base + 4 * MIB
    twin.drop(2)
    twin.create(1, MIB)
    twin.create(3, MIB)
    assert [twin.offset(1), twin.offset(3)] == [2 * MIB, 3 * MIB]
    twin.create(6, 10 * MIB)
    with pytest.raises(ResourceExhausted, match="no room"):
        twin.create(7, 4096)
    with pytest.raises(NotFound):
        twin.offset(7)
    twin.close()


def test_a_dropped_twin_extent_cannot_be_touched() -> None:
    """A late copy into a dropped extent wrote into whatever was mapped there next."""
    script = """
import ctypes
from tiers.twin import TwinTier
twin = TwinTier(1 << 22)
twin.create(0, 1 << 20)
address = twin.address(0)
twin.drop(0)
ctypes.memset(address, 1, 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.returncode == -11


def _mappings() -> int:
    """Bytes of address space without access, and of memfds: what a reserve or a mapping would leave."""
    total = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if "memfd:" in line or line.split()[1] == "---p":
            total += end - begin
    return total


def _shmem_huge_bytes(address: int) -> int:
    """Of the mapping that begins at `address`: mapped by huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("ShmemPmdMapped:"))


def _collapses() -> bool:
    """Whether the kernel makes a huge page when asked for one."""
    fd = os.memfd_create("probe")
    try:
        os.truncate(fd, 2 * MIB)
        os.posix_fallocate(fd, 0, 4096)
        address = map_memory(fd, 2 * MIB)
        refused = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(2 * MIB), 25)
        unmap(address, 2 * MIB)
    finally:
        os.close(fd)
    return refused == 0
