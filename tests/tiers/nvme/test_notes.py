"""The small files that say what a path was resized to and what it has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corruption
from tiers.nvme.notes import (
    BudgetNote,
    SizeNote,
    read_budget,
    read_size,
    remove_size,
    write_budget,
    write_size,
)


def test_what_was_noted_is_read_again(tmp_path: Path) -> None:
    assert read_size(tmp_path) is None
    assert read_budget(tmp_path) is None
    size = SizeNote(configured_bytes=1 << 40, resized_bytes=1 << 30)
    budget = BudgetNote(debt_bytes=0, at_ms=1_700_000_000_000)
    write_size(tmp_path, SizeNote(configured_bytes=1, resized_bytes=2))
    write_size(tmp_path, size)
    write_budget(tmp_path, budget)
    assert read_size(tmp_path) == size
    assert read_budget(tmp_path) == budget
    assert sorted(file.name for file in tmp_path.iterdir()) == ["budget", "size"]
    assert (tmp_path / "size").stat().st_mode & 0o777 == 0o600
    remove_size(tmp_path)
    remove_size(tmp_path)
    assert read_size(tmp_path) is None


@given(st.binary(max_size=64))
def test_a_damaged_note_is_said(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "budget").write_bytes(data)
    try:
        note = read_budget(folder)
    except Corruption:
        with pytest.raises(Corruption, match="delete it"):
            read_budget(folder)
    else:
        assert note is not None
        assert note.debt_bytes >= 0
