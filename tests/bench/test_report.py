"""Tables beside a stored baseline, and what is stored."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from bench import machine as machine_module
from bench.machine import describe, document
from bench.report import Figure, comparison, read_baseline, write_result


def rendered(figures: list[Figure], baseline: dict[str, float]) -> list[list[str]]:
    """Cells of the table, without borders."""
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison("title", figures, baseline))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines if "│" in line]


def test_a_figure_stands_beside_the_stored_one() -> None:
    rows = rendered([Figure(name="match", value=0.5, unit="ms", bound=1.0)], {"match": 0.25})
    assert rows == [["match", "0.5 ms", "≤ 1", "0.25 ms", "2.00"]]


def test_a_name_in_brackets_is_no_markup() -> None:
    assert rendered([Figure(name="find[removed]", value=1, unit="µs")], {})[0][0] == "find[removed]"


def test_a_figure_without_a_stored_one() -> None:
    assert rendered([Figure(name="new", value=12345.6, unit="/s")], {}) == [["new", "12,346 /s", "", ""]]


@pytest.mark.parametrize(
    "value,larger_is_better,reached",
    [(0.9, True, True), (0.89, True, False), (0.9, False, True), (0.91, False, False)],
)
def test_bounds_have_a_direction(value: float, larger_is_better: bool, reached: bool) -> None:
    figure = Figure(name="ratio", value=value, unit="", bound=0.9, larger_is_better=larger_is_better)
    assert figure.reached is reached


def test_no_baseline_is_no_error(tmp_path: Path) -> None:
    assert read_baseline("none", tmp_path) == {}


def test_what_is_stored_is_read_again_with_its_machine(tmp_path: Path) -> None:
    path = write_result("lookup", document({"match_ms": 0.2}), tmp_path)
    found = read_baseline("lookup", tmp_path)
    assert found == json.loads(path.read_text())
    assert found["results"] == {"match_ms": 0.2}
    machine = found["machine"]
    assert isinstance(machine, dict)
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 1 << 28
    assert {"numpy", "grpcio"} <= set(machine["packages"])
    assert machine["python"].count(".") == 2


def test_the_machine_names_its_commit() -> None:
    commit = describe().commit.rstrip("+")
    assert commit == "" or (len(commit) == 12 and int(commit, 16) >= 0)


def test_an_archive_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device runs had no git and stored results without a commit."""
    root = Path(__file__).resolve().parents[2]
    assert machine_module._archived_commit(root / "bench" / "commit.txt") == "", (
        "a checkout has the placeholder"
    )
    assert machine_module._archived_commit(tmp_path / "none") == ""
    head = machine_module._git("rev-parse", "HEAD")
    if not head:
        pytest.skip("no git checkout to archive")
    packed = tmp_path / "archive.tar"
    subprocess.run(
        ["git", "-C", root, "archive", "-o", packed, "HEAD", ".gitattributes", "bench/commit.txt"], check=True
    )
    subprocess.run(["tar", "-xf", packed, "-C", tmp_path], check=True)
    monkeypatch.setattr(machine_module, "_ROOT", tmp_path)
    monkeypatch.setattr(machine_module, "_ARCHIVED", tmp_path / "bench" / "commit.txt")
    assert describe().commit == head[:12]


def test_every_stored_baseline_says_where_it_was_taken() -> None:
    """A figure without its machine is worth nothing."""
    folder = Path(__file__).resolve().parents[2] / "bench" / "results"
    paths = list(folder.rglob("*.json"))
    assert len(paths) > 3
    for path in paths:
        found = read_baseline(path.stem, path.parent)
        assert set(found) == {"machine", "results"}, path.name
        machine = found["machine"]
        assert isinstance(machine, dict)
        assert machine["cpu"]
        assert machine["commit"], path.name
