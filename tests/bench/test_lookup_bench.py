"""`kvstore bench lookup` at tiny sizes, against a real daemon: shape of what it gives."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import lookup
from bench.blocks import LARGE, SMALL, chains, parts, seals_of
from bench.cli import app
from bench.lookup import SHORT, measure
from bench.report import read_baseline
from bench.scale import scale_ratio
from bench.tables import FilledStore
from kvstore.identity import namespace_digest
from kvstore.moves import Outcome

TINY = replace(
    SHORT,
    rows=8192,
    max_rows=1 << 16,
    samples=3,
    loaded_samples=40,
    clients=2,
    seconds=0.1,
    disk_chains=5,
    dram="192MiB",
    nvme="768MiB",
    scale_rows=(4096, 8192),
    control_tokens=4096,
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets stay below the 107 bytes of a unix socket's path, also in a worker of a parallel run."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_every_figure_is_there(short_path: Path) -> None:
    said: list[str] = []
    found = measure(TINY, said.append, short_path).to_json()
    assert set(found) >= {
        "match_ms",
        "call_ms",
        "call_p99_ms_loaded",
        "calls_per_s_1_client",
        "calls_per_s_8_clients",
        "matches_per_s_1_client",
        "matches_per_s_8_clients",
        "control_plane",
        "scale_ratio_10k_to_10m",
        "index_bytes_per_block",
        "random",
        "loaded",
        "storing",
    }
    for pair in (found, found["random"]):
        assert isinstance(pair, dict)
        for key in ("match_ms", "call_ms"):
            assert set(pair[key]) == {"1024", "4096"}
            assert all(value > 0 for value in pair[key].values())
    for name in ("loaded", "storing"):
        loaded = found[name]
        assert isinstance(loaded, dict)
        assert loaded["blocks_read_per_s"] > 0, "nothing was read from disk while it was called loaded"
        assert loaded["evictions_per_s"] > 0, "nothing was evicted while it was called loaded"
    assert found["call_p99_ms_loaded"] == found["loaded"]["call_p99_ms"]  # type: ignore[index]
    control = found["control_plane"]
    assert isinstance(control, dict)
    assert control["prompt_tokens"] == 4096
    assert control["total_ms"] > control["hash_ms"] > 0
    assert found["clients"] == 2
    assert len(said) == 7
    assert list(short_path.iterdir()) == [], "nothing is left on the disk"


def test_the_result_goes_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out` was refused: a run on a lent machine left a table and nothing to keep."""
    result = read_baseline("lookup")["results"]
    monkeypatch.setattr(lookup, "measure", lambda *_: SimpleNamespace(to_json=lambda: result))
    out = tmp_path / "lookup.json"
    assert CliRunner().invoke(app, ["lookup", "--out", str(out)]).exit_code == 0
    written = json.loads(out.read_text())
    assert written["results"] == result
    assert written["machine"]["cores"] > 0


def test_the_ratio_compares_two_stores() -> None:
    assert 0 < scale_ratio(4096, 8192, samples=2) < 100


def test_a_filled_store_holds_what_was_put() -> None:
    filled = FilledStore(10_000)
    assert [len(chain) for chain in filled.chains] == [4096, 4096, 1808]
    for chain in filled.chains:
        grant = filled.acquire(chain)
        assert (grant.outcomes == Outcome.HIT_HBM).all()
        filled.step(released=grant.hbm_slots)
    assert filled.store.check_integrity() == []


def test_chains_are_the_same_in_every_process() -> None:
    """Load clients know what the measuring process has stored by its seed alone; a shorter list is a prefix."""
    key = bytes(range(32))
    first = chains(key, 250, 100, seed=5)
    again = chains(key, 100, 100, seed=5)
    assert [len(chain) for chain in first] == [100, 100, 50]
    assert (first[0] == again[0]).all()
    assert not (first[0] == chains(key, 100, 100, seed=6)[0]).any()


def test_seals_name_their_parents() -> None:
    hashes = np.arange(8, dtype=np.uint64).reshape(4, 2)
    seals = seals_of(3, hashes, np.arange(4, dtype=np.uint32), np.ones(4, dtype=np.uint32))
    assert seals["depth"].tolist() == [0, 1, 2, 3]
    assert (seals["parent"][0] == 0).all()
    assert (seals["parent"][1:] == hashes[:-1]).all()


@pytest.mark.parametrize("geometry,nbytes", [(SMALL, 4096), (LARGE, 1_474_560)])
def test_geometries(geometry: object, nbytes: int) -> None:
    assert geometry.slot_bytes == nbytes  # type: ignore[attr-defined]
    assert len(namespace_digest(parts(geometry, "m"))) == 32  # type: ignore[arg-type]
