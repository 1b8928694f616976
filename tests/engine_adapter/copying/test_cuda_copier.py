"""The CUDA copier over a fake driver: how it cuts, bounds, orders and ends. Real devices: tests/gpu."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.copying.cuda_copier import CudaCopier
from engine_adapter.copying.kernel import KernelShape
from engine_adapter.copying.portions import CopyLimits
from engine_adapter.copying.routes import Lane, Route
from engine_adapter.copying.sum_kernel import SumShape
from engine_adapter.copying.summed import checksums_at
from kvstore.errors import MissingExtra, Unavailable
from tests.engine_adapter.copying.copier_rigs import (
    KERNEL,
    SMALL_LIMITS,
    Blocks,
    FakeDriver,
    FakeKernel,
    FakeSums,
    HostRig,
    batch_of,
    fake_rig,
    rows,
)

KIB = 1024
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction))


def random_blocks(count: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, size=(count, nbytes), dtype=np.uint8)


def driver_of(rig: HostRig) -> FakeDriver:
    driver = rig.copier._driver  # type: ignore[union-attr]
    assert isinstance(driver, FakeDriver)
    return driver


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def sides(rig: HostRig, direction: Direction, blocks: NDArray[np.uint8]) -> tuple[Blocks, Blocks]:
    empty = np.zeros_like(blocks)
    if direction is Direction.LOAD:
        return rig.host(blocks), rig.device(empty)
    return rig.device(blocks), rig.host(empty)


def scattered(side: Blocks, order: NDArray[np.intp]) -> Blocks:
    return Blocks(addresses=side.addresses[order], nbytes=side.nbytes, read=side.read)


def copied(rig: HostRig, direction: Direction, source: Blocks, target: Blocks) -> None:
    done = threading.Event()
    assert rig.copier.submit(batch_of(direction, source, target, done.set))
    assert done.wait(30)


@DIRECTIONS
def test_small_blocks_take_the_kernel_and_see_device_addresses(direction: Direction) -> None:
    limits = CopyLimits(max_blocks=100)
    with fake_rig(limits=limits) as rig:
        blocks = random_blocks(40, 4 * KIB)
        source, target = sides(rig, direction, blocks)
        order = np.random.default_rng(1).permutation(40)
        copied(rig, direction, scattered(source, order), target)
        assert (target.read() == blocks[order]).all()
        assert driver_of(rig).launches == [40]
        assert driver_of(rig).batches == []


@DIRECTIONS
def test_small_blocks_leave_the_multiprocessors_to_an_engine_that_computes(direction: Direction) -> None:
    """Stores of 64 KiB by a kernel made decode 85 % slower."""
    with fake_rig(limits=CopyLimits(max_blocks=100), beside=(Lane(),)) as rig:
        blocks = random_blocks(40, 4 * KIB)
        source, target = sides(rig, direction, blocks)
        order = np.random.default_rng(1).permutation(40)
        for steps, batches, launches in ((1, [40], []), (2, [40, 40], []), (0, [40, 40], [40])):
            rig.copier.computing(steps)
            copied(rig, direction, scattered(source, order), target)
            assert (target.read() == blocks[order]).all()
            assert (driver_of(rig).batches, driver_of(rig).launches) == (batches, launches)


@DIRECTIONS
def test_runs_and_large_blocks_take_the_copy_engines(direction: Direction) -> None:
    with fake_rig(limits=CopyLimits()) as rig:
        blocks = random_blocks(64, 16 * KIB)
        source, target = sides(rig, direction, blocks)
        copied(rig, direction, source, target)
        assert (target.read() == blocks).all()
        assert driver_of(rig).batches == [1], "a run of 1 MiB is one copy"
        assert driver_of(rig).launches == []


def test_a_run_never_leaves_the_pinned_range_it_began_in() -> None:
    """Two DRAM extents may be neighbours; the driver refuses a copy over their border."""
    with fake_rig(limits=CopyLimits()) as rig:
        blocks = random_blocks(32, 16 * KIB)
        device, host = rig.device(blocks), rig.device(np.zeros_like(blocks))
        for half in (0, 16):
            rig.copier.register(int(host.addresses[half]), 16 * 16 * KIB)  # type: ignore[union-attr]
        copied(rig, Direction.STORE, device, host)
        assert (host.read() == blocks).all()
        assert driver_of(rig).batches == [2]


@DIRECTIONS
@pytest.mark.parametrize("fault", ["not pinned", "not aligned"])
def test_what_a_kernel_cannot_copy_takes_the_copy_engines(direction: Direction, fault: str) -> None:
    with fake_rig(limits=CopyLimits()) as rig:
        blocks = random_blocks(9, 4 * KIB)
        source, target = sides(rig, direction, blocks)
        if fault == "not pinned":
            for address in list(driver_of(rig).pinned):
                rig.copier.unregister(address)  # type: ignore[union-attr]
            cut = [
                Blocks(addresses=side.addresses, nbytes=4 * KIB, read=side.read) for side in (source, target)
            ]
        else:
            cut = [
                Blocks(addresses=side.addresses + np.uint64(8), nbytes=4 * KIB - 24, read=side.read)
                for side in (source, target)
            ]
        copied(rig, direction, cut[0], cut[1])
        begin = 0 if fault == "not pinned" else 8
        end = begin + cut[0].nbytes
        assert (target.read()[:, begin:end] == blocks[:, begin:end]).all()
        assert driver_of(rig).launches == []


def paged_rig(*, staging_bytes: int) -> tuple[HostRig, FakeDriver]:
    driver = FakeDriver()
    route = Route(staged=(Lane(kernel=KERNEL, staging_bytes=staging_bytes),), staged_from_bytes=32 * KIB)
    copier = CudaCopier(0, routes=dict.fromkeys(Direction, route), driver=driver, kernel=FakeKernel)
    return HostRig(copier), driver


@DIRECTIONS
def test_pages_that_lie_together_on_the_host_alone_are_staged(direction: Direction) -> None:
    """64 pages in DRAM, in runs of eight, go through 80 KiB of staging memory, 20 at a time."""
    rig, driver = paged_rig(staging_bytes=80 * KIB)
    blocks = random_blocks(64, 4 * KIB)
    source, target = sides(rig, direction, blocks)
    host = (np.arange(8)[::-1, None] * 8 + np.arange(8)).ravel()
    device = np.random.default_rng(2).permutation(64)
    from_, to = (host, device) if direction is Direction.LOAD else (device, host)
    for _ in range(3):  # streams, and with them the staging memory, are used again
        copied(rig, direction, scattered(source, from_), scattered(target, to))
    expected = np.zeros_like(blocks)
    expected[to] = blocks[from_]
    assert (target.read() == expected).all()
    assert driver.launches == 3 * [20, 20, 20, 4]
    assert driver.batches == 3 * [3, 3, 3, 1], "a run of eight is one copy, but for where a portion ends"
    rig.copier.close(5)
    assert not driver._memory, "staging memory is given back"


@DIRECTIONS
def test_pages_apart_on_both_sides_are_not_staged(direction: Direction) -> None:
    rig, driver = paged_rig(staging_bytes=80 * KIB)
    blocks = random_blocks(64, 4 * KIB)
    source, target = sides(rig, direction, blocks)
    order = np.random.default_rng(3).permutation(64)
    copied(rig, direction, scattered(source, order[::-1]), scattered(target, order))
    expected = np.zeros_like(blocks)
    expected[order] = blocks[order[::-1]]
    assert (target.read() == expected).all()
    assert driver.launches == []
    rig.copier.close(5)


@DIRECTIONS
def test_a_batch_may_have_runs_pages_and_lone_blocks(direction: Direction) -> None:
    """A run on both sides goes straight, neighbours on the host alone are staged, the others go one by one."""
    rig, driver = paged_rig(staging_bytes=1024 * KIB)
    blocks = random_blocks(160, 4 * KIB)
    source, target = sides(rig, direction, blocks)
    host = np.concatenate([np.arange(70), np.arange(80, 110), np.arange(158, 110, -2)])
    device = np.concatenate([np.arange(70), np.arange(129, 99, -1), np.arange(70, 94)])
    from_, to = (host, device) if direction is Direction.LOAD else (device, host)
    copied(rig, direction, scattered(source, from_), scattered(target, to))
    expected = np.zeros_like(blocks)
    expected[to] = blocks[from_]
    assert (target.read() == expected).all()
    assert driver.launches == [30]
    assert sorted(driver.batches) == [1, 1, 24]
    rig.copier.close(5)


def test_pages_that_a_kernel_cannot_copy_are_not_staged() -> None:
    rig, driver = paged_rig(staging_bytes=80 * KIB)
    blocks = random_blocks(64, 4 * KIB - 8)
    source, target = sides(rig, Direction.LOAD, blocks)
    order = np.random.default_rng(4).permutation(64)
    copied(rig, Direction.LOAD, source, scattered(target, order))
    assert (target.read()[order] == blocks).all()
    assert driver.launches == []
    rig.copier.close(5)


def test_an_idle_copier_issues_at_once_on_the_thread_of_its_caller() -> None:
    """No hand-over between threads before the first byte; what comes behind it waits for the issuing thread."""
    limits = CopyLimits(first_bytes=64 * KIB, portion_bytes=256 * KIB)
    with fake_rig(limits=limits, small=Lane()) as rig:
        driver = driver_of(rig)
        issuers: list[str] = []
        whole = driver.copy_batch

        def noted(*arguments: object) -> None:
            issuers.append(threading.current_thread().name)
            whole(*arguments)  # type: ignore[arg-type]

        driver.copy_batch = noted  # type: ignore[method-assign]
        blocks = random_blocks(40, 16 * KIB)
        source, target = sides(rig, Direction.STORE, blocks)
        order = np.random.default_rng(1).permutation(40)
        copied(rig, Direction.STORE, scattered(source, order), target)
        assert (target.read() == blocks[order]).all()
        assert issuers == [threading.current_thread().name] + 3 * ["kvstore-store-issue"]
        assert driver.batches == [4, 8, 16, 12]


def test_lanes_of_different_sizes_have_the_same_streams() -> None:
    """Devices have eight queues unless told otherwise, and the engine needs some of them."""
    driver = FakeDriver()
    copier = CudaCopier(0, driver=driver, kernel=FakeKernel)
    assert len(driver._streams) == 4, "two a direction"
    copier.close(5)
    assert not driver._streams
    two = Route(small=(Lane(streams=1), Lane(streams=3)))
    copier = CudaCopier(0, routes=dict.fromkeys(Direction, two), driver=driver, kernel=FakeKernel)
    assert len(driver._streams) == 10
    copier.close(5)


def test_several_lanes_share_a_portion() -> None:
    driver = FakeDriver()
    route = Route(small=(Lane(kernel=KERNEL, weight=3), Lane(weight=1)))
    copier = CudaCopier(0, routes=dict.fromkeys(Direction, route), driver=driver, kernel=FakeKernel)
    rig = HostRig(copier)
    blocks = random_blocks(40, 4 * KIB)
    source, target = sides(rig, Direction.LOAD, blocks)
    copied(rig, Direction.LOAD, scattered(source, np.arange(39, -1, -1)), target)
    assert (target.read() == blocks[::-1]).all()
    assert (driver.launches, driver.batches) == ([30], [10])
    copier.close()


def test_bytes_under_way_are_bounded_and_nothing_waits_between_portions() -> None:
    limits = CopyLimits(portion_bytes=128 * KIB, flight_bytes=512 * KIB, flight_portions=100)
    with fake_rig(limits=limits) as rig:
        blocks = random_blocks(64, 64 * KIB)
        source, target = sides(rig, Direction.STORE, blocks)
        driver = driver_of(rig)
        driver.hold()
        done = threading.Event()
        rig.copier.submit(
            batch_of(Direction.STORE, scattered(source, np.arange(63, -1, -1)), target, done.set)
        )
        wait_for("the bound", lambda: driver.most_bytes_under_way == 512 * KIB)
        time.sleep(0.02)
        assert driver.most_bytes_under_way == 512 * KIB
        assert not done.is_set()
        driver.open()
        assert done.wait(30)
        assert (target.read() == blocks[::-1]).all()
        # The bound counts a portion until its thread has seen it land, so less may be under way but never more.
        assert driver.most_bytes_under_way == 512 * KIB


def test_a_batch_comes_after_the_event_it_names() -> None:
    with fake_rig() as rig:
        driver = driver_of(rig)
        blocks = random_blocks(4, 4 * KIB)
        source, target = sides(rig, Direction.STORE, blocks)
        compute = driver.create_event()
        done = threading.Event()
        rig.copier.submit(batch_of(Direction.STORE, source, target, done.set, after=compute))
        time.sleep(0.05)
        assert not target.read().any()
        driver._events[compute].set()
        assert done.wait(30)
        assert (target.read() == blocks).all()


def test_close_drops_what_was_not_issued_and_waits_for_what_was() -> None:
    """After close the memory is unmapped: a copy that was still under way then wrote into another mapping."""
    with fake_rig() as rig:
        driver = driver_of(rig)
        blocks = random_blocks(6, 256 * KIB)
        source, target = sides(rig, Direction.STORE, blocks)
        driver.hold()
        ended: list[int] = []
        for i in range(6):
            rig.copier.submit(
                CopyBatch(
                    direction=Direction.STORE,
                    sources=source.addresses[i : i + 1],
                    targets=target.addresses[i : i + 1],
                    nbytes=256 * KIB,
                    done=lambda i=i: ended.append(i),
                )
            )
        wait_for("two under way", lambda: driver.most_bytes_under_way == 512 * KIB)
        opener = threading.Timer(0.3, driver.open)
        opener.start()
        rig.copier.close(0.05)
        assert ended == [0, 1]
        found = target.read()
        assert (found[:2] == blocks[:2]).all()
        assert not found[2:].any()


def test_a_device_that_fails_is_said_to_the_next_caller() -> None:
    with fake_rig(small=Lane()) as rig:
        blocks = random_blocks(2, 4 * KIB)
        source, target = sides(rig, Direction.LOAD, blocks)
        driver_of(rig).broken = True
        ended: list[bool] = []
        failed = threading.Event()
        load = batch_of(Direction.LOAD, source, target, lambda: ended.append(True))
        rig.copier.submit(replace(load, failed=failed.set))
        assert failed.wait(30), "who waits for it hears that it does not come"

        def refused() -> bool:
            try:
                rig.copier.submit(batch_of(Direction.LOAD, source, target, lambda: ended.append(True)))
            except Unavailable as error:
                return "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
            return False

        wait_for("the error", refused)
        assert not ended
        copied(
            rig,
            Direction.STORE,
            rig.device(np.ones((0, 4 * KIB), np.uint8)),
            rig.device(np.ones((0, 4 * KIB), np.uint8)),
        )


def test_without_a_compiler_small_blocks_take_the_copy_engines(caplog: pytest.LogCaptureFixture) -> None:
    def missing(driver: FakeDriver, shape: KernelShape) -> FakeKernel:
        raise MissingExtra("copy kernels need cuda-bindings")

    driver = FakeDriver()
    route = Route(small=(Lane(kernel=KERNEL),))
    copier = CudaCopier(0, routes=dict.fromkeys(Direction, route), driver=driver, kernel=missing)
    rig = HostRig(copier)
    blocks = random_blocks(3, 4 * KIB)
    source, target = sides(rig, Direction.LOAD, blocks)
    copied(rig, Direction.LOAD, source, target)
    assert (target.read() == blocks).all()
    assert "need cuda-bindings" in caplog.text
    copier.close()


class NoSums:
    """A device on which the kernel does not compile."""

    def __init__(self, driver: FakeDriver, shape: SumShape) -> None:
        raise MissingExtra("checksums on a GPU need cupy: pip install 'kvstore[cuda]'")

    def launch(self, addresses: NDArray[np.uint64], nbytes: int, sums_at: int, stream: int) -> None:
        raise AssertionError("it was not made")


def test_where_a_device_takes_no_checksums_copies_go_on_and_the_log_says_who_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_rig(limits=CopyLimits(), sums=NoSums) as rig:
        assert not rig.copier.takes_sums(1 << 20)
        blocks = random_blocks(9, 4 * KIB)
        source, target = sides(rig, Direction.STORE, blocks)
        done, sums = threading.Event(), np.zeros((9, 2), dtype=np.uint64)
        assert rig.copier.submit(batch_of(Direction.STORE, source, target, done.set, sums=sums))
        assert done.wait(30)
        assert (target.read() == blocks).all()
        assert not sums.any(), "unknown"
    assert "checksums are taken by the movers: checksums on a GPU need cupy" in caplog.text


class OtherSums(FakeSums):
    """A device whose checksums are not those of storage."""

    def launch(self, addresses: NDArray[np.uint64], nbytes: int, sums_at: int, stream: int) -> None:
        super().launch(addresses, nbytes - KIB, sums_at, stream)


def test_a_device_whose_checksums_are_others_takes_none(caplog: pytest.LogCaptureFixture) -> None:
    """Every block that it stored would be called wrong when it is loaded, and thrown away."""
    with fake_rig(limits=CopyLimits(), sums=OtherSums) as rig:
        assert not rig.copier.takes_sums(1 << 20)
    assert "computes other checksums than the processor" in caplog.text


def test_a_long_batch_is_summed_portion_by_portion() -> None:
    """Summed four portions at a time, a load waited at its end for up to 256 MiB: 1.3 ms after its last byte."""
    limits = replace(SMALL_LIMITS, max_blocks=40, planned_portions=4)
    with fake_rig(limits=limits) as rig:
        blocks = random_blocks(40, 16 * KIB)
        source, target = sides(rig, Direction.LOAD, blocks)
        order = np.random.default_rng(1).permutation(40)
        done, sums = threading.Event(), np.zeros((40, 2), dtype=np.uint64)
        batch = batch_of(Direction.LOAD, scattered(source, order), target, done.set, sums=sums)
        driver_of(rig).sums.clear()  # the copier has tried them
        assert rig.copier.submit(batch)
        assert done.wait(30)
        assert sum(driver_of(rig).sums) == 40
        assert max(driver_of(rig).sums) <= SMALL_LIMITS.portion_copies
        assert (sums == checksums_at(rows(blocks[order]), 16 * KIB)).all()


@DIRECTIONS
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("nbytes", [16 * KIB, 256 * KIB])
def test_blocks_are_whole_with_the_portion_that_brings_their_last_bytes(
    direction: Direction, groups: int, nbytes: int
) -> None:
    """Not in the order of the batch where some are copied as runs, or staged; a block that is summed before it has come
    would be called wrong, and thrown away."""
    count = 60
    driver = FakeDriver()
    copier = CudaCopier(0, driver=driver, kernel=FakeKernel, sums=FakeSums)
    rig, blocks = HostRig(copier), np.zeros((count + 1, nbytes), dtype=np.uint8)
    source, target = sides(rig, direction, blocks)
    for seed in range(8):
        order = some_in_runs(count, seed)
        batch = batch_of(direction, scattered(source, order), scattered(target, order), print)
        batch = replace(batch, groups=groups if direction is Direction.LOAD else 1)
        starts = np.sort(batch.targets)
        came, told = np.zeros(count + 1, dtype=np.int64), []
        for portion in copier._ways[direction].planner.portions(batch, 8 * nbytes):
            first = np.searchsorted(starts, portion.pieces.targets, side="right") - 1
            for at, size in zip(first.tolist(), portion.pieces.sizes.tolist(), strict=True):
                came[at : at + -(-size // nbytes)] += min(size, nbytes)
            told += portion.whole
            at = np.searchsorted(starts, batch.targets[portion.whole.start : portion.whole.stop])
            assert (came[at] == nbytes).all()
        assert sorted(told) == list(range(len(order)))
    copier.close(5)


def some_in_runs(count: int, seed: int) -> NDArray[np.intp]:
    """Blocks of which some are neighbours, in runs of many lengths, in any order of the runs; never the last one."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, count), size=rng.integers(1, 9), replace=False))
    parts = np.split(np.arange(count), cuts)
    return np.concatenate([parts[at] for at in rng.permutation(len(parts))])
