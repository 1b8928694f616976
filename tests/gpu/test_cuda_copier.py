"""The CUDA copier on a device: bytes of every size and route, order after events, neighbours across extents, ends.

The contract that it shares with the twin is in tests/engine_adapter/copying/test_copier.py, under the marker `gpu` too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.copy_tune import candidates
from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.copying.cuda_driver import CudaDriver, cuda_devices
from engine_adapter.copying.portions import CopyLimits
from kvstore.errors import FailedPrecondition, ResourceExhausted
from kvstore.faults import FAULT_VARIABLE
from tests.engine_adapter.copying.copier_rigs import Blocks, GpuRig, batch_of, gpu_rig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_devices(), reason="no CUDA device")]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[2]
ROUTES = ("engine", "engine x4", "threads 8", "bulk 8", "engine + bulk 4")
STAGED = ("staged 16 MiB", "staged 16 MiB, threads 8")
BOTH = pytest.mark.parametrize("direction", list(Direction))


@pytest.fixture
def rig() -> Iterator[GpuRig]:
    with gpu_rig(limits=CopyLimits()) as rig:
        yield rig


def random_blocks(count: int, nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    words = np.random.default_rng(seed).integers(0, 1 << 63, size=count * nbytes // 8, dtype=np.uint64)
    return words.view(np.uint8).reshape(count, nbytes)


def picked(side: Blocks, order: NDArray[np.intp]) -> Blocks:
    return Blocks(addresses=side.addresses[order], nbytes=side.nbytes, read=side.read)


def sides(rig: GpuRig, direction: Direction, blocks: NDArray[np.uint8]) -> tuple[Blocks, Blocks]:
    empty = np.zeros_like(blocks)
    if direction is Direction.LOAD:
        return rig.host(blocks), rig.device(empty)
    return rig.device(blocks), rig.host(empty)


def copy(rig: GpuRig, direction: Direction, source: Blocks, target: Blocks) -> None:
    done = threading.Event()
    assert rig.copier.submit(batch_of(direction, source, target, done.set))
    assert done.wait(30)


def check_scattered(rig: GpuRig, direction: Direction, nbytes: int, count: int) -> None:
    blocks = random_blocks(count, nbytes, seed=nbytes)
    source, target = sides(rig, direction, blocks)
    rng = np.random.default_rng(count)
    from_, to = rng.permutation(count)[: count - 3], rng.permutation(count)[: count - 3]
    copy(rig, direction, picked(source, from_), picked(target, to))
    expected = np.zeros_like(blocks)
    expected[to] = blocks[from_]
    assert (target.read() == expected).all(), "each block in its place, and nothing beside them"


@BOTH
@pytest.mark.parametrize("nbytes", [4 * KIB << i for i in range(12)])
def test_scattered_blocks_of_every_size(rig: GpuRig, direction: Direction, nbytes: int) -> None:
    check_scattered(rig, direction, nbytes, count=max(7, min(5000, 64 * MIB // nbytes)))


@BOTH
@pytest.mark.parametrize("nbytes", [4 * KIB, 5_008, 20 * KIB, 36 * KIB, 1_474_560])
@pytest.mark.parametrize("name", ROUTES)
def test_every_route_copies_the_same_bytes(direction: Direction, nbytes: int, name: str) -> None:
    """Sizes that are no multiple of a kernel's unit leave a shorter last one."""
    with gpu_rig(limits=CopyLimits(), routes=dict(candidates()[name])) as rig:
        check_scattered(rig, direction, nbytes, count=max(40, min(3000, 32 * MIB // nbytes)))


@BOTH
@pytest.mark.parametrize("nbytes", [4 * KIB, 20 * KIB, 64 * KIB])
@pytest.mark.parametrize("name", STAGED)
def test_staged_pages_arrive(direction: Direction, nbytes: int, name: str) -> None:
    """More than both staging memories hold, so each is used again while its bytes could still be under way."""
    count = 56 * MIB // nbytes // 16 * 16
    with gpu_rig(limits=CopyLimits(), routes=dict(candidates()[name])) as rig:
        assert rig.copier._ways[direction]._lanes.staged[0]._staging is not None
        blocks = random_blocks(count, nbytes)
        source, target = sides(rig, direction, blocks)
        rng = np.random.default_rng(nbytes)
        host = (rng.permutation(count // 16)[:, None] * 16 + np.arange(16)).ravel()
        device = rng.permutation(count)
        from_, to = (host, device) if direction is Direction.LOAD else (device, host)
        copy(rig, direction, picked(source, from_), picked(target, to))
        expected = np.empty_like(blocks)
        expected[to] = blocks[from_]
        assert (target.read() == expected).all()


@BOTH
def test_kernels_are_compiled_where_the_routes_name_them(
    direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this a missing compiler would leave every other test green, on the copy engines."""
    for name in ("threads 8", "bulk 8"):
        with gpu_rig(routes=dict(candidates()[name])) as rig:
            lane = rig.copier._ways[direction]._lanes.small[0]
            assert lane.kernel is not None, caplog.text


@BOTH
def test_runs_are_copied_across_two_pinned_ranges(rig: GpuRig, direction: Direction) -> None:
    """The driver refuses a copy that begins in one registration and ends in the next."""
    blocks = random_blocks(64, 64 * KIB)
    source, target = sides(rig, direction, blocks)
    host = source if direction is Direction.LOAD else target
    base = int(host.addresses[0])
    rig.copier.unregister(base)
    rig.copier.register(base, 32 * 64 * KIB)
    rig.copier.register(base + 32 * 64 * KIB, 32 * 64 * KIB)
    copy(rig, direction, source, target)
    assert (target.read() == blocks).all()
    rig.copier.unregister(base + 32 * 64 * KIB)


def test_both_directions_at_once(rig: GpuRig) -> None:
    ways = []
    for direction in Direction:
        blocks = random_blocks(512, 256 * KIB, seed=direction)
        source, target = sides(rig, direction, blocks)
        order = np.random.default_rng(direction).permutation(512)
        ways.append((direction, blocks[order], picked(source, order), target, threading.Event()))
    for direction, _, source, target, done in ways:
        assert rig.copier.submit(batch_of(direction, source, target, done.set))
    for _, expected, _, target, done in ways:
        assert done.wait(30)
        assert (target.read() == expected).all()


@BOTH
def test_what_is_under_way_stays_bounded(direction: Direction) -> None:
    limits = CopyLimits(portion_bytes=4 * MIB, flight_bytes=16 * MIB, flight_portions=4)
    with gpu_rig(limits=limits) as rig:
        blocks = random_blocks(256, 1 * MIB)
        source, target = sides(rig, direction, blocks)
        done = threading.Event()
        most = 0
        assert rig.copier.submit(batch_of(direction, source, target, done.set))
        while not done.is_set():
            most = max(most, rig.copier._ways[direction]._flight_bytes)
        assert 0 < most <= 16 * MIB
        assert (target.read() == blocks).all()


def test_a_store_comes_after_the_event_it_names(rig: GpuRig) -> None:
    """The block's bytes are written by 40 ms of work in another stream, of which the event is the end."""
    driver = rig.driver
    old, new = random_blocks(64, 4 * MIB, seed=1), random_blocks(64, 4 * MIB, seed=2)
    device, fresh, target = rig.device(old), rig.host(new), rig.host(np.zeros_like(old))
    stream, event = driver.create_stream(urgent=0.0), driver.create_event()
    driver.enter()
    for _ in range(8):
        for to, from_ in zip(device.addresses.tolist(), fresh.addresses.tolist(), strict=True):
            driver.copy(to, from_, 4 * MIB, stream)
    driver.record(event, stream)
    done = threading.Event()
    assert rig.copier.submit(batch_of(Direction.STORE, device, target, done.set, after=event))
    assert done.wait(30)
    assert (target.read() == new).all()
    driver.destroy(streams=[stream], events=[event])


def test_close_leaves_nothing_under_way(rig: GpuRig) -> None:
    """After close memory is unmapped, or given to others."""
    blocks = random_blocks(96, 8 * MIB)
    source, target = sides(rig, Direction.STORE, blocks)
    ended: list[int] = []
    for i in range(96):
        batch = CopyBatch(
            direction=Direction.STORE,
            sources=source.addresses[i : i + 1],
            targets=target.addresses[i : i + 1],
            nbytes=8 * MIB,
            done=lambda i=i: ended.append(i),
        )
        assert rig.copier.submit(batch)
    rig.copier.close(0.0)
    arrived = len(ended)
    assert ended == list(range(arrived))
    assert arrived < 96, "the deadline was over before they could all be issued"
    found = target.read()
    assert (found[:arrived] == blocks[:arrived]).all()
    time.sleep(0.2)
    assert (target.read() == found).all()


@BOTH
def test_the_highest_blocks_of_more_than_64_gib(rig: GpuRig, direction: Direction) -> None:
    """Addresses and offsets are 64 bits wide everywhere."""
    nbytes, count = 64 * KIB, 64
    try:
        base = rig.driver.allocate(66 * GIB)
    except ResourceExhausted:
        pytest.skip("less than 66 GiB of device memory are free")
    rig._device.append(base)
    blocks = random_blocks(count, nbytes)
    places = np.uint64(base + 66 * GIB) - np.arange(1, count + 1, dtype=np.uint64) * np.uint64(nbytes)
    high = Blocks(addresses=places, nbytes=nbytes, read=lambda: blocks)
    there, back = rig.host(blocks), rig.host(np.zeros_like(blocks))
    copy(rig, Direction.LOAD, there, high)
    copy(rig, Direction.STORE, high, back)
    assert (back.read() == blocks).all()


def test_a_run_across_two_extents_of_one_range(rig: GpuRig) -> None:
    """HBM extents lie back to back in one range, each an allocation of its own."""
    hbm = pytest.importorskip("tiers.hbm", reason="the HBM tier is not in this tree")
    tier = hbm.HbmTier(hbm.CudaDevice(index=0), 64 * MIB)
    for extent in range(2):
        tier.adopt(extent, tier.new_extent(8 * MIB), 8 * MIB)
    blocks = random_blocks(16, 1 * MIB)
    places = np.uint64(tier.base) + np.arange(16, dtype=np.uint64) * np.uint64(MIB)
    both = Blocks(addresses=places, nbytes=MIB, read=lambda: blocks)
    there, back = rig.host(blocks), rig.host(np.zeros_like(blocks))
    copy(rig, Direction.LOAD, there, both)
    copy(rig, Direction.STORE, both, back)
    assert (back.read() == blocks).all()
    rig.copier.close(10.0)
    tier.close()


VICTIM = """
import numpy as np, sys, threading
from engine_adapter.copying.copier import Direction
from tests.engine_adapter.copying.copier_rigs import batch_of, gpu_rig
from engine_adapter.copying.portions import CopyLimits
with gpu_rig(limits=CopyLimits()) as rig:
    source = rig.device(np.ones((64, 4 << 20), dtype=np.uint8))
    target = rig.host(np.zeros((64, 4 << 20), dtype=np.uint8))
    print("submits", flush=True)
    done = threading.Event()
    rig.copier.submit(batch_of(Direction.STORE, source, target, lambda: (print("done", flush=True), done.set())))
    done.wait(30)
"""


@pytest.mark.parametrize("fault", ["", "copy.issued:kill", "copy.done:kill"])
def test_a_kill_between_launch_and_completion_says_nothing(fault: str) -> None:
    """A store learns of a copy by `done` alone: a process that dies after the launch has announced nothing."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, FAULT_VARIABLE: fault}
    ended = subprocess.run(
        [sys.executable, "-c", VICTIM], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=90
    )
    assert ended.stdout.split() == (["submits", "done"] if not fault else ["submits"]), ended.stderr
    assert ended.returncode == (-signal.SIGKILL if fault else 0), ended.stderr


def test_a_device_that_is_not_there_is_one_clear_line() -> None:

    with pytest.raises(FailedPrecondition, match="no CUDA device 99"):
        CudaDriver(99)
