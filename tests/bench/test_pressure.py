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
from bench.prompts import Schedule
from kvstore.errors import InvalidArgument, Unavailable


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets stay below the 107 bytes of a unix socket's path, also in a worker of a parallel run."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def silent(_: str) -> None: ...


def test_a_cell_is_written_as_it_is_read() -> None:
    cell = pressure.parse_cell("8/round_robin/dram")
    assert cell == pressure.Cell(ratio=8, schedule=Schedule.ROUND_ROBIN, tiers=pressure.Tiers.DRAM)
    assert str(cell) == "8/round_robin/dram"
    for text in ("8", "x/zipf/dram", "8/lifo/dram", "8/zipf/tape", "8/zipf/dram/more"):
        with pytest.raises(InvalidArgument, match="is no cell"):
            pressure.parse_cell(text)


def test_the_grid_is_the_whole_grid() -> None:
    assert len(pressure.CUDA.cells) == len(set(pressure.CUDA.cells)) == 3 * 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_more_tiers_hit_more(short_path: Path) -> None:
    cells = [pressure.parse_cell(f"2/round_robin/{tiers}") for tiers in ("off", "dram")]
    plan = replace(pressure.CPU, visits=4, visits_off=2)
    off, dram = (pressure.measure_cell(plan, cell, silent, device="cpu", parent=short_path) for cell in cells)
    assert off.hit_rate == off.plain_lru_hit_rate == 0
    assert off.cold_ttft_p50_s is None
    assert dram.documents == off.documents >= 4
    assert dram.document_tokens >= 2 * 1024, "the documents are twice the HBM"
    assert dram.hit_rate_by_tier["dram"] > 0.5
    assert dram.hit_rate == pytest.approx(sum(dram.hit_rate_by_tier.values()))
    assert 0.5 < dram.plain_lru_hit_rate <= 1
    assert dram.visits == dram.documents
    assert list(short_path.iterdir()) == [], "nothing is left on the disk"


def test_a_cell_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid takes long: what was measured before must be in the file."""

    def measure_cell(plan: object, cell: pressure.Cell, *_: object, **__: object) -> pressure.CellResult:
        if cell.tiers is pressure.Tiers.DISK:
            raise Unavailable("no disk")
        return pressure.CellResult(
            cell=str(cell),
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

    monkeypatch.setattr(pressure, "measure_cell", measure_cell)
    out = tmp_path / "pressure.json"

    def run(*cells: str) -> int:
        options = [option for cell in cells for option in ("--cell", cell)]
        return CliRunner().invoke(app, ["pressure", "--device", "cpu", "--out", str(out), *options]).exit_code

    assert run("2/zipf/off", "2/zipf/disk") == 0
    assert run("4/zipf/off") == 0
    assert run("4/zipf/disk") != 0, "a run without any result is a failure"
    stored = json.loads(out.read_text())["results"]["cells"]
    assert [cell["cell"] for cell in stored] == ["2/zipf/off", "2/zipf/disk", "4/zipf/off", "4/zipf/disk"]
    assert ["error" in cell for cell in stored] == [False, True, False, True]
