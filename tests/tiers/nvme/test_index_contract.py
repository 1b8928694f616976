"""What a durable index promises, of the one in LMDB and of its twin in memory, on which the simulation stands."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import Corruption, ResourceExhausted
from tests.simulation.index_twin import IndexFile, IndexTwin
from tests.tiers.nvme.test_index import records, refs
from tiers.nvme import index_marks
from tiers.nvme.index import RECORD, SLOT_REF, BlockIndex, DurableIndex, load_index

MAP_BYTES = 1 << 20
NO_RECORDS = np.empty(0, dtype=RECORD)
NO_REFS = np.empty(0, dtype=SLOT_REF)


class Machine(Protocol):
    """Where an index lies, and what can happen to it."""

    def open(self, durability: Durability) -> BlockIndex:
        """The index, open for writing."""

    def anew(self, durability: Durability) -> BlockIndex:
        """An empty one in its place."""

    def kill(self) -> None:
        """Its process is gone, in the middle of whatever it did; the machine goes on."""

    def start_again(self) -> None:
        """The machine has been off."""

    def load(self) -> NDArray[np.void]:
        """What the next process finds."""


class Lmdb:
    """A directory; a kill leaves a copy of its files as they were."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._kills = directory / "0", 0
        self._directory.mkdir()
        self._open: list[DurableIndex] = []
        self._patch = monkeypatch

    def open(self, durability: Durability) -> BlockIndex:
        self._open.append(DurableIndex(self._directory, map_bytes=MAP_BYTES, durability=durability))
        return self._open[-1]

    def anew(self, durability: Durability) -> BlockIndex:
        self._open.append(DurableIndex.anew(self._directory, map_bytes=MAP_BYTES, durability=durability))
        return self._open[-1]

    def kill(self) -> None:
        self._kills += 1
        killed, self._directory = self._directory, self._directory.with_name(str(self._kills))
        shutil.copytree(killed, self._directory)
        self._open.pop().close()

    def start_again(self) -> None:
        self._patch.setattr(index_marks, "boot_id", lambda: "another boot")

    def load(self) -> NDArray[np.void]:
        return load_index(self._directory)


class Twin:
    """An IndexFile."""

    def __init__(self) -> None:
        self._file, self._boot = IndexFile(), 1

    def open(self, durability: Durability) -> BlockIndex:
        synced = durability is Durability.POWER
        return IndexTwin(self._file, map_bytes=MAP_BYTES, synced=synced, boot=self._boot)

    def anew(self, durability: Durability) -> BlockIndex:
        synced = durability is Durability.POWER
        return IndexTwin.anew(self._file, map_bytes=MAP_BYTES, synced=synced, boot=self._boot)

    def kill(self) -> None:
        pass

    def start_again(self) -> None:
        self._file.power_cut()
        self._boot += 1

    def load(self) -> NDArray[np.void]:
        return self._file.load(self._boot)


@pytest.fixture(params=["lmdb", "twin"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Lmdb(tmp_path, monkeypatch) if request.param == "lmdb" else Twin()


@pytest.fixture(params=[Durability.PROCESS, Durability.POWER], ids=lambda durability: durability.value)
def durability(request: pytest.FixtureRequest) -> Durability:
    value: Durability = request.param
    return value


def test_what_was_committed_outlives_a_kill_by_slab_and_slot(
    machine: Machine, durability: Durability
) -> None:
    index = machine.open(durability)
    index.commit(records(2, [300, 1]), NO_REFS)
    index.commit(records(1, [7]), NO_REFS)
    machine.kill()
    assert np.array_equal(machine.load(), np.concatenate((records(1, [7]), records(2, [1, 300]))))


def test_an_index_goes_on_where_a_killed_one_was(machine: Machine, durability: Durability) -> None:
    machine.open(durability).commit(records(1, [1, 2]), NO_REFS)
    machine.kill()
    index = machine.open(durability)
    assert not index.empty
    index.commit(records(1, [3], generation=2), refs(1, [1]))
    machine.kill()
    assert machine.load()[["slot", "generation"]].tolist() == [(2, 1), (3, 2)]


def test_a_slot_that_is_freed_and_given_again_holds_the_new_block(
    machine: Machine, durability: Durability
) -> None:
    index = machine.open(durability)
    index.commit(records(1, [1]), NO_REFS)
    index.commit(records(1, [1], generation=5), refs(1, [1, 2]))
    machine.kill()
    assert machine.load()["generation"].tolist() == [5]


def test_a_dropped_slab_is_forgotten_alone(machine: Machine, durability: Durability) -> None:
    index = machine.open(durability)
    index.commit(np.concatenate((records(1, [1]), records(2, [1, 500]), records(3, [2]))), NO_REFS)
    index.drop_slab(2)
    machine.kill()
    assert machine.load()["slab"].tolist() == [1, 3]


def test_a_transaction_that_does_not_fit_changes_nothing(machine: Machine, durability: Durability) -> None:
    index = machine.open(durability)
    fitted = 0
    with contextlib.suppress(ResourceExhausted):
        for slab in range(1, 1000):
            index.commit(records(slab, [1, 200]), NO_REFS)
            fitted = slab
    assert 0 < fitted < 999
    machine.kill()
    assert machine.load()["slab"].tolist() == [slab for slab in range(1, fitted + 1) for _ in range(2)]


def test_a_closed_index_survives_a_power_cut(machine: Machine, durability: Durability) -> None:
    index = machine.open(durability)
    index.commit(records(1, [1]), NO_REFS)
    if isinstance(machine, Lmdb):
        machine._open.pop()
    index.close()
    machine.start_again()
    assert machine.load()["slot"].tolist() == [1]


def test_what_power_committed_survives_a_power_cut(machine: Machine) -> None:
    index = machine.open(Durability.POWER)
    index.commit(records(1, [1]), NO_REFS)
    machine.kill()
    machine.start_again()
    assert machine.load()["slot"].tolist() == [1]


def test_an_index_without_syncs_is_not_believed_after_a_power_cut(machine: Machine) -> None:
    index = machine.open(Durability.PROCESS)
    index.commit(records(1, [1]), NO_REFS)
    machine.kill()
    machine.start_again()
    with pytest.raises(Corruption):
        machine.load()
    with pytest.raises(Corruption):
        machine.open(Durability.POWER)


def test_without_an_index_there_is_nothing_to_load(machine: Machine) -> None:
    with pytest.raises(Corruption):
        machine.load()


def test_an_index_made_anew_is_not_believed_before_it_is_complete(
    machine: Machine, durability: Durability
) -> None:
    """A start that was killed while it made the index from the trailers left an empty one, which the next start
    believed: every block of the path was lost, and its slabs were deleted."""
    machine.open(durability).commit(records(1, [1, 2]), NO_REFS)
    machine.kill()
    machine.anew(durability)
    machine.kill()
    with pytest.raises(Corruption):
        machine.load()
    with pytest.raises(Corruption):
        machine.open(durability)
    index = machine.anew(durability)
    index.commit(records(1, [2]), NO_REFS)
    machine.kill()
    with pytest.raises(Corruption):
        machine.load()


def test_an_index_closed_before_it_is_complete_is_not_believed(
    machine: Machine, durability: Durability
) -> None:
    """An end in order marked an index as clean that had not learnt of all blocks yet."""
    index = machine.anew(durability)
    index.commit(records(1, [1]), NO_REFS)
    if isinstance(machine, Lmdb):
        machine._open.pop()
    index.close()
    with pytest.raises(Corruption):
        machine.load()


def test_an_index_made_anew_and_complete_is_one_like_others(machine: Machine, durability: Durability) -> None:
    index = machine.anew(durability)
    index.commit(records(1, [1, 2]), NO_REFS)
    index.complete()
    index.commit(records(1, [3]), NO_REFS)
    machine.kill()
    assert machine.load()["slot"].tolist() == [1, 2, 3]
    machine.start_again()
    if durability is Durability.POWER:
        assert machine.load()["slot"].tolist() == [1, 2, 3]
    else:
        with pytest.raises(Corruption):
            machine.load()
