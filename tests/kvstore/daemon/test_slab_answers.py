"""What a path makes of answers about slabs that their extents are no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.slab_answers import SlabAnswers
from kvstore.layout import ExtentState, TableShape, Tier, open_columns, table_bytes
from kvstore.wire import mover as wire

PATH, EXTENT, OLD, NEW = 1, 3, 7, 9
SHAPE = TableShape(max_rows=8, hbm_slots=8, dram_slots=8, nvme_slots=8, max_extents=8)


class Path:
    """Path 1, whose extent 3 is slab 9; what its answers changed is in `did`."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.columns = open_columns(memoryview(bytearray(table_bytes(SHAPE))), SHAPE)
        self.table = SlabTable(self.columns, {})
        self.columns.extent_state[EXTENT] = ExtentState.READY
        self.columns.extent_tier[EXTENT] = Tier.NVME
        self.columns.extent_device[EXTENT] = PATH
        self.table.set(EXTENT, NEW, 4096)
        paths: Any = SimpleNamespace(
            slab_failed=self._slab_failed,
            slab_lost=lambda extent: self.did.append(f"lost {extent}"),
        )
        owner: Any = SimpleNamespace(
            store=SimpleNamespace(paths=paths), counters=SimpleNamespace(add=self.did.append)
        )
        index: Any = SimpleNamespace(drop_slab=lambda number: self.did.append(f"forgot {number}"))
        voice: Any = SimpleNamespace(
            number=PATH,
            folder="/f",
            complain=lambda *said: self.did.append("said"),
            settled=lambda _: self.did.append("settled"),
        )
        self.goes_on = False
        """Whether the path has other slabs to go on with where one cannot be made."""
        self.answers = SlabAnswers(
            owner=owner, columns=self.columns, table=self.table, index=index, voice=voice
        )

    def _slab_failed(self, extent: int) -> bool:
        self.did.append(f"failed {extent}")
        return self.goes_on

    def hear(self, number: int) -> list[str]:
        """All that a mover can say against slab `number` of extent 3; what it changed."""
        self.answers.failed(wire.SlabFailed(extent=EXTENT, number=number, text="no", exists=True))
        self.answers.lost({EXTENT: number})
        self.answers.failed(wire.SlabFailed(extent=EXTENT, number=number, text="no"))
        return self.did


@pytest.fixture
def path() -> Path:
    """One."""
    return Path()


def test_what_is_said_of_an_extents_slab_is_heard(path: Path) -> None:
    told = [
        "said",
        "nvme_slabs_lost_total",
        "lost 3",
        "forgot 9",
        "nvme_slabs_refused_total",
        "failed 3",
        "said",
    ]
    assert path.hear(NEW) == told
    assert path.table.number(EXTENT) == 0


def test_the_slab_before_an_extents_present_one_is_not_it(path: Path) -> None:
    """A slab that could not be opened, to be deleted, took the number of the one that came after it from its extent."""
    assert path.hear(OLD) == []
    assert path.table.number(EXTENT) == NEW


@pytest.mark.parametrize(
    "column, value",
    [("extent_state", ExtentState.FREE), ("extent_tier", Tier.DRAM), ("extent_device", PATH + 1)],
)
def test_an_extent_that_is_another_paths_or_no_slab_is_left_alone(
    path: Path, column: str, value: int
) -> None:
    """An extent that had left meanwhile ended the turn of the daemon with all other answers of the mover."""
    getattr(path.columns, column)[EXTENT] = value
    assert path.hear(NEW) == []


def test_a_path_without_room_for_a_slab_that_becomes_smaller_is_well(path: Path) -> None:
    """It warned for ever that there was no space for a slab, though told to do with fewer, as the warning advises."""
    path.goes_on = True
    path.answers.failed(wire.SlabFailed(extent=EXTENT, number=NEW, text="no space"))
    path.did.clear()
    path.answers.left(EXTENT + 1)
    assert path.did == []
    path.answers.left(EXTENT)
    assert path.did == ["settled"]
