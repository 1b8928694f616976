"""`kvstore bench index` at a tiny size: a real start over an index that it has made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from bench.index import IndexPlan, figures, measure


def test_a_start_over_a_made_index_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    (found,) = measure(IndexPlan(blocks=(5_000,), usual_s=0.2), said.append, tmp_path)
    assert len(said) == 3
    assert found.ready_s <= found.known_s
    assert 64 * 5_000 <= found.index_file_bytes < 128 * 5_000
    assert found.table_bytes > 60 * found.max_rows
    assert found.call_p99_ms > 0
    assert (found.call_p99_ms_meanwhile is None) == (found.calls_meanwhile < 1000), "too few say nothing"
    assert {figure.name.partition(":")[0] for figure in figures({"sizes": [asdict(found)]})} == {
        "5,000 blocks"
    }
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"
