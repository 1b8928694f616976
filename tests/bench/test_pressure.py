"""`kvstore bench pressure` at tiny sizes on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import pressure
from bench.cli import app
from bench.pressure_cells import PressureCells
from bench.pressure_plan import CPU, CUDA, Cell, Tiers, parse_cell
from bench.prompts import Schedule
from kvstore.errors import InvalidArgument, Unavailable


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets stay below the 107 bytes of a unix socket's path, also in a worker of a parallel run."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def silent(_: str) -> None: ...


def test_a_cell_is_written_as_it_is_read() -> None:
    for text, cell in {
        "8/round_robin/dram": Cell(ratio=8, schedule=Schedule.ROUND_ROBIN, tiers=Tiers.DRAM),
        "2/zipf/disk/auto": Cell(ratio=2, schedule=Schedule.ZIPF, tiers=Tiers.DISK, policy="auto"),
    }.items():
        assert parse_cell(text) == cell
        assert str(cell) == text
    assert parse_cell("8/zipf/dram/lru") == parse_cell("8/zipf/dram")
    for text in (
        "8",
        "x/zipf/dram",
        "8/lifo/dram",
        "8/zipf/tape",
        "8/zipf/dram/newest",
        "8/zipf/dram/lru/more",
    ):
        with pytest.raises(InvalidArgument, match="is no cell"):
            parse_cell(text)


def test_the_grid_is_the_whole_grid_with_auto_beside_what_goes_round() -> None:
    assert len(set(CUDA.cells)) == len(CUDA.cells) == 3 * 2 * 4 + 3 * 2
    beside = [cell for cell in CUDA.cells if cell.policy != "lru"]
    assert {(cell.schedule, cell.policy) for cell in beside} == {(Schedule.ROUND_ROBIN, "auto")}
    assert {replace(cell, policy="lru") for cell in beside} <= set(CUDA.cells)


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_more_tiers_hit_more(short_path: Path) -> None:
    cells = [parse_cell(f"2/round_robin/{tiers}") for tiers in ("off", "dram/auto")]
    plan = replace(CPU, visits=4, visits_off=2)
    off, dram = (pressure.measure_cell(plan, cell, silent, device="cpu", parent=short_path) for cell in cells)
    assert off.hit_rate == off.plain_lru_hit_rate == 0
    assert off.cold_ttft_p50_s is None
    assert dram.policy == "auto"
    assert dram.documents == off.documents >= 4
    assert dram.document_tokens >= 2 * 1024, "the documents are twice the HBM"
    assert dram.hit_rate_by_tier["dram"] > 0.5
    assert dram.hit_rate == pytest.approx(sum(dram.hit_rate_by_tier.values()))
    assert 0.5 < dram.plain_lru_hit_rate <= 1
    assert dram.visits == 2 * dram.documents
    assert sum(dram.hit_rate_by_round) / 2 == pytest.approx(dram.hit_rate, abs=0.01)
    assert dram.seconds > 0
    assert list(short_path.iterdir()) == [], "nothing is left on the disk"


def found(cell: Cell) -> pressure.CellResult:
    return pressure.CellResult(
        cell=str(cell),
        policy=cell.policy,
        documents=1,
        document_tokens=1,
        visits=1,
        cold_ttft_p50_s=None,
        ttft_p50_s=1.0,
        ttft_p99_s=1.0,
        tokens_per_s=1.0,
        prompt_tokens_per_s=1.0,
        hit_rate=0.0,
        hit_rate_by_tier={},
        plain_lru_hit_rate=0.0,
    )


class Bench:
    """The command over cells that are not measured; a disk fails."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.measured: list[str] = []

    def measure_cell(self, plan: object, cell: Cell, *_: object, **__: object) -> pressure.CellResult:
        self.measured.append(str(cell))
        if cell.tiers is Tiers.DISK:
            raise Unavailable("no disk")
        return found(cell)

    def run(self, *options: str) -> int:
        command = ["pressure", "--device", "cpu", "--out", str(self.out), *options]
        return CliRunner().invoke(app, command).exit_code

    def cells(self, *cells: str) -> int:
        return self.run(*[option for cell in cells for option in ("--cell", cell)])

    def stored(self) -> list[dict[str, object]]:
        cells: list[dict[str, object]] = json.loads(self.out.read_text())["results"]["cells"]
        return cells


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path / "pressure.json")
    monkeypatch.setattr(pressure, "measure_cell", made.measure_cell)
    return made


def test_a_cell_that_fails_loses_no_other(bench: Bench) -> None:
    """The grid takes long: what was measured before must be in the file."""
    assert bench.cells("2/zipf/off", "2/zipf/disk") == 0
    assert bench.cells("4/zipf/off") == 0
    assert bench.cells("4/zipf/disk") != 0, "a run without any result is a failure"
    names = ["2/zipf/off", "2/zipf/disk", "4/zipf/off", "4/zipf/disk"]
    assert [cell["cell"] for cell in bench.stored()] == names
    assert ["error" in cell for cell in bench.stored()] == [False, True, False, True]
    assert all(cell["commit"] for cell in bench.stored())


def test_a_run_goes_on_where_the_last_one_ended(bench: Bench) -> None:
    """A lent machine is there for minutes, the grid takes longer: it was measured from its beginning each time."""
    assert bench.run("--within", "0") == 0
    assert bench.measured == []
    assert bench.run() == 0
    first, bench.measured = bench.measured, []
    assert first == [str(cell) for cell in CPU.cells]
    assert bench.run() != 0
    assert bench.measured == ["2/round_robin/disk"], "what failed is measured again, and nothing else"
    assert bench.cells("2/round_robin/off") == 0
    assert bench.measured[-1] == "2/round_robin/off", "a cell that is named is measured again"


def test_processes_share_a_file(tmp_path: Path) -> None:
    """One a GPU: what one wrote was lost when another wrote what it had read before."""
    path, sizes = tmp_path / "pressure.json", {"hbm": "8GiB", "lengths": (1, 2)}
    one, other = (PressureCells(path, device, sizes, {}) for device in ("cuda:0", "cuda:1"))
    one.add({"cell": "a", "hits": 1})
    other.add({"cell": "b", "error": "no disk"})
    one.add({"cell": "c", "hits": 2})
    assert other.measured() == {"a", "c"}
    assert [cell["cell"] for cell in PressureCells(path, "cuda:0", sizes, {}).result()["cells"]] == [
        "a",
        "b",
        "c",
    ]
    for device, others, worker in (
        ("cpu", sizes, {}),
        ("cuda:0", {**sizes, "hbm": "1GiB"}, {}),
        ("cuda:0", sizes, {"worker.load": "always"}),
    ):
        with pytest.raises(InvalidArgument, match="name another file"):
            PressureCells(path, device, others, worker)
