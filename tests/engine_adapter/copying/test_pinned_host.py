"""Which host memory is pinned when: by the copies that need it, and ahead of them by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying import pinned_host
from engine_adapter.copying.copier import Direction
from engine_adapter.copying.pinned_host import PinnedHost
from kvstore.errors import KvstoreError
from tests.engine_adapter.copying.copier_rigs import SEEN_AT, FakeDriver, batch_of, fake_rig

RANGE = 0x1000
STARTS = (0x10000, 0x20000, 0x30000)


class SlowDriver(FakeDriver):
    """Pinning waits for `go`, once for each range; `began` has the ranges in order."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[int] = []
        self.go = threading.Semaphore(0)

    def register(self, address: int, nbytes: int) -> int:
        self.began.append(address)
        assert self.go.acquire(timeout=10)
        return super().register(address, nbytes)


@pytest.fixture
def driver() -> SlowDriver:
    return SlowDriver()


@pytest.fixture
def host(driver: SlowDriver) -> Iterator[PinnedHost]:
    made = PinnedHost(driver, settle_s=0.0)  # type: ignore[arg-type]
    for start in STARTS:
        made.register(start, RANGE)
    yield made
    for _ in STARTS:
        driver.go.release()
    made.close()


def at(*addresses: int) -> NDArray[np.uint64]:
    return np.asarray(addresses, dtype=np.uint64)


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def test_pinned_ranges_come_and_go() -> None:
    driver = FakeDriver()
    host = PinnedHost(driver)  # type: ignore[arg-type]
    host.register(0x20000, 0x1000)
    host.register(0x10000, 0x2000)
    inside = at(0x10000, 0x11FFF, 0x20FFF)
    host.pin(inside)
    seen = host.seen_by_kernels(inside)
    assert seen is not None
    assert (seen == inside + np.uint64(SEEN_AT)).all()
    assert host.starts.tolist() == [0x10000, 0x20000]
    for outside in (0xFFFF, 0x12000, 0x21000):
        host.pin(at(outside))
        assert host.seen_by_kernels(at(0x10000, outside)) is None
    host.unregister(0x10000)
    host.unregister(0x30000)
    assert host.seen_by_kernels(inside) is None
    assert driver.pinned == {0x20000: 0x1000}
    host.close()


def test_memory_that_cannot_be_pinned_is_only_slow(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(FakeDriver):
        def register(self, address: int, nbytes: int) -> int:
            raise KvstoreError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    host = PinnedHost(Refusing())  # type: ignore[arg-type]
    host.register(0x10000, 0x1000)
    host.pin(at(0x10000))
    assert not host.pending(at(0x10000))
    host.unregister(0x10000)
    host.close()
    assert "copies will be slow" in caplog.text


def test_nothing_is_pinned_before_something_needs_it(host: PinnedHost, driver: SlowDriver) -> None:
    assert host.pending(at(*STARTS))
    assert host.starts.tolist() == list(STARTS), "copies keep within a range that is still to be pinned"
    assert host.seen_by_kernels(at(STARTS[0])) is None
    assert not host.pending(at(0x40000))
    host.pin(at(0x40000))  # none of ours
    time.sleep(0.02)
    assert driver.began == []


def test_a_copy_pins_what_it_needs_first_and_then_come_the_others_in_order(
    host: PinnedHost, driver: SlowDriver
) -> None:
    copy = threading.Thread(target=host.pin, args=(at(STARTS[2], STARTS[2] + 8),))
    copy.start()
    until(lambda: len(driver.began) == 2)  # the copy's own thread, and the one that pins ahead
    assert set(driver.began) == {STARTS[2], STARTS[0]}
    for _ in STARTS:
        driver.go.release()
    copy.join(10)
    assert not host.pending(at(STARTS[2]))
    until(lambda: not host.pending(at(*STARTS)))
    assert driver.began[2:] == [STARTS[1]]
    assert driver.pinned == dict.fromkeys(STARTS, RANGE)


def test_a_copy_waits_for_the_range_that_is_being_pinned(host: PinnedHost, driver: SlowDriver) -> None:
    host.pin_ahead()
    until(lambda: driver.began == [STARTS[0]])
    copy = threading.Thread(target=host.pin, args=(at(STARTS[0]),))
    copy.start()
    copy.join(0.05)
    assert copy.is_alive()
    driver.go.release()
    copy.join(10)
    assert not copy.is_alive()
    assert driver.began.count(STARTS[0]) == 1


def test_a_range_is_unpinned_before_it_goes_also_while_it_is_being_pinned(
    host: PinnedHost, driver: SlowDriver
) -> None:
    host.pin_ahead()
    until(lambda: driver.began == [STARTS[0]])
    host.unregister(STARTS[1])  # it has not begun: nothing to wait for
    leaving = threading.Thread(target=host.unregister, args=(STARTS[0],))
    leaving.start()
    leaving.join(0.05)
    assert leaving.is_alive(), "the driver still has it"
    driver.go.release()
    leaving.join(10)
    driver.go.release()
    until(lambda: not host.pending(at(*STARTS)))
    assert driver.pinned == {STARTS[2]: RANGE}
    assert driver.began == [STARTS[0], STARTS[2]]


def test_pinning_ahead_lets_a_first_request_go_first_but_not_a_copy(driver: SlowDriver) -> None:
    host = PinnedHost(driver, settle_s=60.0)  # type: ignore[arg-type]
    for start in STARTS:
        driver.go.release()
        host.register(start, RANGE)
    host.pin_ahead()
    time.sleep(0.02)
    assert driver.began == []
    host.pin(at(STARTS[1]))
    until(lambda: not host.pending(at(*STARTS)))
    host.close()


def test_what_is_mapped_later_is_pinned_too(host: PinnedHost, driver: SlowDriver) -> None:
    for _ in range(4):
        driver.go.release()
    host.pin_ahead()
    until(lambda: not host.pending(at(*STARTS)))
    host.register(0x50000, RANGE)
    until(lambda: not host.pending(at(0x50000)))
    assert driver.began == [*STARTS, 0x50000]


def test_close_waits_for_what_is_under_way_and_begins_nothing_more(
    host: PinnedHost, driver: SlowDriver
) -> None:
    host.pin_ahead()
    until(lambda: driver.began == [STARTS[0]])
    closing = threading.Thread(target=host.close)
    closing.start()
    until(lambda: not host.pending(at(STARTS[1])))
    assert closing.is_alive()
    driver.go.release()
    closing.join(10)
    host.register(0x50000, RANGE)
    host.pin(at(*STARTS, 0x50000))
    assert driver.began == [STARTS[0]]
    for start in (*STARTS, 0x50000):
        host.unregister(start)
    assert driver.pinned == {}


def test_pinning_ahead_rests_while_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches wait for the driver while it pins: the first prompt after a start took 8 s instead of 0.2 s."""
    monkeypatch.setattr(pinned_host, "_RESTS", 1e9)

    class Timed(FakeDriver):
        def register(self, address: int, nbytes: int) -> int:
            time.sleep(0.001)
            return super().register(address, nbytes)

    driver = Timed()
    host = PinnedHost(driver, settle_s=0.0)  # type: ignore[arg-type]
    host.computing = True
    for start in STARTS:
        host.register(start, RANGE)
    host.pin_ahead()
    until(lambda: list(driver.pinned) == [STARTS[0]])
    time.sleep(0.05)
    assert list(driver.pinned) == [STARTS[0]]
    host.pin(at(STARTS[2]))
    assert list(driver.pinned) == [STARTS[0], STARTS[2]], "a copy does not wait for the engine"
    host.computing = False
    until(lambda: set(driver.pinned) == set(STARTS))
    host.close()


@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.name.lower())
def test_who_submits_never_waits_for_pinning(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    go, submitter = threading.Event(), threading.get_ident()
    register = FakeDriver.register

    def slowly(self: FakeDriver, address: int, nbytes: int) -> int:
        assert threading.get_ident() != submitter
        assert go.wait(10)
        return register(self, address, nbytes)

    with fake_rig() as rig:
        monkeypatch.setattr(FakeDriver, "register", slowly)
        done = threading.Event()
        blocks = np.arange(4 * 4096, dtype=np.uint32).view(np.uint8).reshape(4, -1)
        host, device = rig.device(blocks), rig.device(blocks[::-1].copy())
        rig.copier.register(int(host.addresses[0]), blocks.nbytes)  # type: ignore[union-attr]
        source, target = (host, device) if direction is Direction.LOAD else (device, host)
        expected = source.read()
        assert rig.copier.submit(batch_of(direction, source, target, done.set))
        assert not done.wait(0.05), "no byte moves before its memory is pinned"
        assert (untouched := target.read()).any()
        assert not (untouched == expected).all()
        go.set()
        assert done.wait(10)
        assert (target.read() == expected).all()
