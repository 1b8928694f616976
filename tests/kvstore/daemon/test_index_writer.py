"""Group commits by themselves: what an index that is made anew says of itself between two batches."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.daemon import index_writer
from kvstore.daemon.index_writer import IndexWriter
from kvstore.daemon.nvme import IndexBatch, OpenPath
from kvstore.errors import Corruption, KvstoreError
from kvstore.settings import Durability
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex, load_index

BATCH_SLOTS = index_writer._BATCH_SLOTS
MAP_BYTES = 4 << 20


def records(first: int, count: int) -> NDArray[np.void]:
    """Blocks of slab 1, in slots from `first` on."""
    found = np.zeros(count, dtype=RECORD)
    found["slab"], found["slot"], found["generation"], found["length"] = (
        1,
        range(first, first + count),
        1,
        4096,
    )
    found["hash"] = np.stack([found["slot"] + 1, found["slot"]], axis=1)
    return found


class Rig:
    """A writer over a real index that was made anew, and a store that has `batches` to say."""

    def __init__(self, folder: Path, batches: list[NDArray[np.void]], patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.batches = deque(batches)
        self.committed: list[int] = []
        self.put_back: list[int] = []
        self.index = DurableIndex.anew(folder, map_bytes=MAP_BYTES, durability=Durability.POWER)
        patch.setattr(index_writer, "index_batch", lambda changes, *_: changes)
        changes = SimpleNamespace(
            take=lambda path, limit: self._batch(),
            committed=lambda slots: self.committed.append(len(slots)),
            put_back=self.put_back.append,
        )
        store = SimpleNamespace(
            index_changes=changes,
            budget=lambda path: SimpleNamespace(spend=lambda *_: None),
        )
        owner = SimpleNamespace(
            store=store,
            counters=SimpleNamespace(add=lambda name: None),
            warnings={},
            now_ms=lambda: 1,
            settle_soon=lambda: None,
            config=SimpleNamespace(durability=Durability.POWER),
        )
        opened = SimpleNamespace(
            directory=SimpleNamespace(path=folder),
            index=self.index,
            plan=SimpleNamespace(map_bytes=MAP_BYTES),
        )
        self.writer = IndexWriter(
            number=0,
            owner=cast(Any, owner),
            columns=cast(Any, None),
            slabs=cast(Any, None),
            opened=cast(OpenPath, opened),
        )

    def _batch(self) -> IndexBatch:
        published = self.batches.popleft() if self.batches else records(0, 0)
        return IndexBatch(
            slots=published["slot"].copy(),
            dropped_slabs=(),
            freed=np.empty(0, dtype=SLOT_REF),
            published=published,
        )

    async def commit(self) -> bool:
        """One round; whether there was one to do."""
        task = self.writer.start()
        if task is not None:
            await task
        return task is not None

    def killed(self) -> Path:
        """What lies on the disk now, as the next start finds it."""
        copy = self.folder.with_name(f"killed-{len(self.committed)}")
        shutil.copytree(self.folder, copy)
        return copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "path"
    made.mkdir()
    return made


def test_a_kill_between_two_batches_leaves_an_index_that_nobody_believes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was marked as whole when it was made: the next start believed the first batch, and lost all others."""
    rig = Rig(folder, [records(0, BATCH_SLOTS), records(BATCH_SLOTS, 10)], monkeypatch)

    async def commits() -> None:
        assert await rig.commit()
        with pytest.raises(Corruption, match="was not made to its end"):
            load_index(rig.killed())
        assert await rig.commit(), "a whole batch: there may be more"
        assert len(load_index(rig.killed())) == BATCH_SLOTS + 10
        assert not await rig.commit()

    asyncio.run(commits())
    assert rig.committed == [BATCH_SLOTS, 10]
    rig.index.close()


def test_an_index_with_nothing_to_learn_is_whole_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(folder, [], monkeypatch)
    with pytest.raises(Corruption, match="was not made to its end"):
        load_index(rig.killed())
    asyncio.run(rig.writer.catch_up())
    shutil.rmtree(folder.with_name("killed-0"))
    assert len(load_index(rig.killed())) == 0
    rig.index.close()


def test_a_batch_that_fails_leaves_it_incomplete_and_comes_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(folder, [records(0, 10), records(0, 10)], monkeypatch)

    def full(*_: object) -> None:
        raise KvstoreError("the index of the NVMe tier failed: full")

    async def commits() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rig.index, "commit", full)
            assert await rig.commit()
        assert rig.put_back == [0]
        with pytest.raises(Corruption, match="was not made to its end"):
            load_index(rig.killed())
        rig.writer.due()
        assert await rig.commit()

    asyncio.run(commits())
    assert rig.committed == [10]
    assert len(load_index(rig.killed())) == 10
    rig.index.close()
