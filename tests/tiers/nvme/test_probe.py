"""How a disk is found out: whether its calls are queued, and how many threads it wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.nvme import probe
from tiers.nvme.carry import IS_COMPILED, carry, carry_in_turn
from tiers.nvme.pieces import PIECE_BYTES, QUEUED_PIECE_BYTES
from tiers.nvme.probe import QUEUED_THREADS, plan_io, probe_queue, probe_threads
from tiers.nvme.slab import open_slab


def test_threads_are_probed_once(tmp_path: Path) -> None:
    threads = probe_threads(tmp_path)
    assert 1 <= threads <= 16
    (tmp_path / "threads").write_text("6\n")
    assert probe_threads(tmp_path) == 6
    (tmp_path / "threads").write_text("nonsense")
    assert 1 <= probe_threads(tmp_path) <= 16
    assert [entry.name for entry in tmp_path.iterdir()] == ["threads"]


def test_a_disk_that_cannot_be_probed_has_a_default(tmp_path: Path) -> None:
    assert probe_threads(tmp_path / "missing") == 4


def test_a_queue_is_found_where_there_is_one(tmp_path: Path) -> None:
    if not IS_COMPILED:
        pytest.skip("there is no C compiler here: nothing is queued")
    slab = open_slab(tmp_path, 1, 1 << 20, 16384)
    slab.close()
    if not slab.direct:
        pytest.skip("this file system has no O_DIRECT")
    assert probe_queue(tmp_path), (
        "or this kernel makes each call wait: nothing is wrong, and movers take more threads"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["slab-1-16384.kv"]


def test_few_threads_do_where_calls_are_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "is_queued", lambda fd, data: True)
    plan = plan_io(tmp_path)
    assert (plan.carry, plan.threads, plan.piece_bytes) == (carry, QUEUED_THREADS, QUEUED_PIECE_BYTES)
    assert plan_io(tmp_path, threads=2).threads == 2


def test_elsewhere_the_disk_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "is_queued", lambda fd, data: False)
    (tmp_path / "threads").write_text("5\n")
    plan = plan_io(tmp_path)
    assert (plan.carry, plan.threads, plan.shares, plan.piece_bytes) == (carry_in_turn, 5, 5, PIECE_BYTES)
    assert plan_io(tmp_path, threads=2).threads == 2
    assert plan_io(tmp_path / "missing", threads=2).carry is carry_in_turn
