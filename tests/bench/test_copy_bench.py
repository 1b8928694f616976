"""`kvstore bench copy` at tiny sizes: the twin, and all that it does on a device over a fake driver."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from rich.console import Console

from bench import copy_sides
from bench.copy import CopyPlan, bound, figures, measure
from bench.copy_commands import copy as copy_command
from bench.copy_tune import LIMITS, TuneCell, TunePlan, candidates, table, tune
from engine_adapter.copying import cuda_copier
from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.copying.routes import DEFAULT_ROUTES
from kvstore.errors import ConfigError, KvstoreError
from tests.engine_adapter.copying.copier_rigs import FakeDriver

KIB = 1024
TINY = CopyPlan(block_bytes=(16 * KIB, 256 * KIB), nbytes=4096 * KIB, rounds=2)
WAYS = ("load", "store", "both")


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that seems to have a CUDA device, though no compiler for its kernels."""
    for module in (copy_sides, cuda_copier):
        monkeypatch.setattr(module, "CudaDriver", FakeDriver)
    monkeypatch.setattr(copy_sides, "cuda_devices", lambda: 1)


def check_legs(device: str) -> None:
    said: list[str] = []
    result = asdict(measure(TINY, said.append))
    assert result["device"] == device
    assert [(leg["block_bytes"], leg["pattern"], leg["way"]) for leg in result["legs"]] == [
        (size, pattern, way)
        for size in TINY.block_bytes
        for pattern in ("scattered", "pages", "runs", "one")
        for way in WAYS
    ]
    for leg in result["legs"]:
        assert leg["gb_per_s"] > 0
        assert leg["ratio"] > 0
        looped = leg["block_bytes"] >= 256 * KIB and leg["pattern"] != "one"
        assert (leg["loop_gb_per_s"] is not None) == looped
    assert len(said) == 9
    each = 2 if result["legs"][0]["summed_ratio"] is None else 3  # the fake device takes no checksums
    assert len(figures(result)) == each * len(result["legs"]) + 6 * (each - 1), (
        "what a batch costs is a figure of each lone block"
    )


def test_every_way_pattern_and_size_is_measured_with_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_sides, "cuda_devices", lambda: 0)
    check_legs("host memory")


@pytest.mark.usefixtures("fake_device")
def test_and_on_a_device() -> None:
    check_legs("a fake device")


@pytest.mark.usefixtures("fake_device")
def test_blocks_that_do_not_arrive_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(self: cuda_copier.CudaCopier, batch: CopyBatch) -> bool:
        batch.done()
        return True

    monkeypatch.setattr(cuda_copier.CudaCopier, "submit", lazy)
    with pytest.raises(KvstoreError, match="is not what was copied"):
        measure(TINY, lambda _: None)


@pytest.mark.usefixtures("fake_device")
def test_candidates_are_tried_and_shown_by_size() -> None:
    names = ("engine", "engine x4", "engine + bulk 4", "staged 8 MiB")
    sizes = (("scattered", 16 * KIB), ("pages", 32 * KIB))
    cells = tune(TunePlan(cells=sizes, nbytes=1024 * KIB, rounds=1, names=names), lambda _: None)
    assert [(cell.name, cell.pattern, cell.block_bytes, cell.way) for cell in cells] == [
        (name, pattern, size, way)
        for name in names
        for pattern, size in sizes
        for way in WAYS
        if pattern == "pages" or name != "staged 8 MiB"
    ]
    console = Console(width=140, record=True)
    console.print(table(cells, "load"))
    text = console.export_text()
    assert all(name in text for name in (*names, "scattered 16 KiB", "pages 32 KiB"))


@pytest.mark.usefixtures("fake_device")
def test_one_candidate_and_way_alone() -> None:
    """A candidate of loads leaves stores as they go, so there is nothing to measure of them."""
    plan = TunePlan(
        cells=(("scattered", 32 * KIB),),
        nbytes=1024 * KIB,
        rounds=1,
        names=("load 3 bulk 8 + engine",),
        ways=("load",),
    )
    assert [(cell.name, cell.way) for cell in tune(plan, lambda _: None)] == [
        ("load 3 bulk 8 + engine", "load")
    ]
    assert candidates()["load 3 bulk 8 + engine"][Direction.STORE] is DEFAULT_ROUTES[Direction.STORE]


def test_what_checksums_cost_stands_beside() -> None:
    cell = TuneCell(
        name="engine",
        way="load",
        pattern="scattered",
        block_bytes=32 * KIB,
        gb_per_s=50.0,
        ratio=0.9,
        summed_ratio=0.877,
    )
    console = Console(width=140, record=True)
    console.print(table([cell, replace(cell, name="engine x1", summed_ratio=None)], "load"))
    text = console.export_text()
    assert "0.900 0.877" in text.split("engine x1")[0]
    assert "0.877" not in text.split("engine x1")[1]


@pytest.mark.usefixtures("fake_device")
def test_a_name_that_is_no_candidate_is_one_clear_line() -> None:
    plan = TunePlan(cells=(), nbytes=64 * KIB, rounds=1, names=("engine x9",))
    with pytest.raises(ConfigError, match="no candidate is named 'engine x9': default, "):
        tune(plan, lambda _: None)


def test_names_are_of_what_tune_tries() -> None:
    with pytest.raises(ConfigError, match="--tune"):
        copy_command(only=["engine"])


def test_tuning_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_sides, "cuda_devices", lambda: 0)
    with pytest.raises(ConfigError):
        tune(TunePlan(cells=(("scattered", 16 * KIB),), nbytes=64 * KIB, rounds=1), lambda _: None)


def test_every_candidate_fits_the_device() -> None:
    """A CTA may have 227 KiB of shared memory on Hopper, and a stage is loaded before it is stored."""
    for routes in candidates().values():
        for direction in Direction:
            for lane in (*routes[direction].staged, *routes[direction].small):
                if lane.kernel is not None:
                    assert lane.kernel.shared_bytes <= 227 * KIB - 1 * KIB
                    assert 0 < lane.kernel.lag < lane.kernel.stages


def test_bounds_are_those_that_were_promised() -> None:
    assert bound("load", 4096 * KIB) == bound("store", 8192 * KIB) == 0.98
    assert bound("load", 32 * KIB) == bound("store", 64 * KIB) == 0.90
    assert bound("both", 4096 * KIB) == 0.92
    assert bound("load", 16 * KIB) is None


def test_limits_are_those_of_candidates() -> None:
    assert set(LIMITS) <= set(candidates())
