"""What an export may not lose: blocks that only the disk has, and blocks that move meanwhile."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from kvstore.cli.admin import call_admin
from kvstore.cli.export import export
from kvstore.cli.namespaces import ask, choose
from kvstore.client import connect
from kvstore.config import ServeConfig
from kvstore.transfer.export import export_namespace, write_archive
from kvstore.transfer.plan import Planned
from kvstore.transfer.restore import check_file
from kvstore.transfer.source import Batch, pack_blocks
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.transfer.conftest import SLOT_BYTES, engine, many, parts
from tests.support.blocks import block_bytes
from tests.support.daemon import small_config, started
from tiers.nvme.slab import stride_bytes

BLOCKS = 3300  # four batches of 1,024


def quiet(_done: int, _total: int) -> None:
    """Nobody looks."""


def whole(file: Path) -> int:
    """Blocks of a file that has all that it was to have."""
    header, found = asyncio.run(check_file(file, progress=quiet))
    assert (found.damaged, found.complete, found.stored) == (0, True, header.planned_blocks)
    return found.stored


def only_on_disk(place: Path, blocks: int) -> ServeConfig:
    """A service that has run, and whose blocks lie in its slabs alone."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service, engine(service, parts()) as one:
        one.store(many(1, blocks))
        assert one.client.flush().pending_blocks == 0
    return config


def damage(slab: Path, slots: int) -> None:
    """A byte of each of the first blocks of a slab."""
    stride = stride_bytes(SLOT_BYTES)
    with slab.open("r+b") as file:
        for slot in range(slots):
            file.seek(slot * stride + 5000)
            byte = file.read(1)
            file.seek(slot * stride + 5000)
            file.write(bytes([byte[0] ^ 1]))


def test_no_block_that_only_the_disk_has_is_lost(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two batches were read at once into one page: up to half of the blocks were left out, and it ended with 0."""
    config = only_on_disk(place, BLOCKS)
    folder = str(place / "nvme")
    export(place / "offline", namespace="m", offline=True, nvme=[folder])
    assert whole(place / "offline") == BLOCKS
    with started(config) as service:
        assert service.tier("dram").sealed_slots == 0
        export(place / "online", namespace="m", socket=service.socket)
        assert whole(place / "online") == BLOCKS
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2, "nothing is said of blocks that are missing"


def test_blocks_that_are_there_and_cannot_be_read_are_told_and_end_with_1(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that an export could not read counted as gone, and it ended with 0."""
    config = only_on_disk(place, 50)
    (slab,) = (place / "nvme").glob("slab-*.kv")
    with started(config) as service:
        damage(slab, 3)
        with pytest.raises(typer.Exit) as ended:
            export(place / "online", namespace="m", socket=service.socket)
        assert ended.value.exit_code == 1
        assert "\n3 blocks are there and could not be read" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        export(place / "offline", namespace="m", offline=True, nvme=[str(place / "nvme")])
    assert ended.value.exit_code == 1
    assert "\n3 blocks are there and could not be read" in capsys.readouterr().out
    for name in ("online", "offline"):
        _, found = asyncio.run(check_file(place / name, progress=quiet))
        assert (found.stored, found.damaged) == (47, 0), "the others are in the file"


def test_a_block_that_has_changed_in_dram_is_exported_from_the_disk(place: Path) -> None:
    """It was given a new checksum, and would have been a sound block for whoever imports it."""
    with started(small_config(place, nvme_bytes=128 * MIB)) as service, engine(service, parts()) as one:
        hashes = one.store(many(1, 8))
        assert one.client.flush().pending_blocks == 0
        grant = one.session.acquire(one.namespace, 1, hashes).result(30)
        one.session.dram.view(int(grant.dram_slots[3]))[4321] ^= 1
        export(place / "m.kvx", namespace="m", socket=service.socket)
    assert whole(place / "m.kvx") == 8
    written = (place / "m.kvx").read_bytes()
    assert [block_bytes(block, SLOT_BYTES).tobytes() in written for block in hashes] == [True] * 8


def test_a_block_in_a_slab_that_was_made_meanwhile_is_read(place: Path) -> None:
    """The slabs were asked for once: what moved into a new one after that was left out."""
    config = only_on_disk(place, 50)
    asked: list[str] = []

    def late(socket: str, method: str, request: Any) -> Any:
        asked.append(method)
        return pb.SlabsReply() if asked == ["Slabs"] else call_admin(socket, method, request)

    with started(config) as service, connect(service.socket) as client:
        info = choose(ask(service.socket), "m", None)
        admin = functools.partial(late, service.socket)
        done = asyncio.run(export_namespace(client, admin, info, place / "m.kvx", progress=quiet))
    assert (done.blocks, done.gone, done.unread) == (50, 0, 0)
    assert asked == ["Slabs", "Slabs"]


class _Slow:
    """Reads nothing but zeros, and notes how many calls there are at a time."""

    def __init__(self) -> None:
        self.calls, self.most = 0, 0
        self._busy = 0
        self._lock = threading.Lock()

    def read(self, planned: Planned) -> Batch:
        with self._lock:
            self.calls += 1
            self._busy += 1
            self.most = max(self.most, self._busy)
        time.sleep(0.01)
        with self._lock:
            self._busy -= 1
        payloads = np.zeros((len(planned), 4096), dtype=np.uint8)
        return pack_blocks(planned, payloads, np.ones(len(planned), dtype=np.bool_), hbm_only=0, unread=0)


def _planned(blocks: int) -> Planned:
    pairs = np.arange(2 * blocks, dtype=np.uint64).reshape(blocks, 2)
    each = np.arange(blocks, dtype=np.uint32)
    touches = each.astype(np.uint64)
    return Planned(rows=each, words=touches, hashes=pairs, parents=pairs, depths=each, touches=touches)


def test_one_batch_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source was called in two threads at once, though its calls share what they read with."""
    monkeypatch.setattr("kvstore.transfer.export._BATCH_BLOCKS", 10)
    source, planned = _Slow(), _planned(95)
    info = pb.NamespaceInfo(
        digest=bytes(32),
        key=bytes(16),
        parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in parts().items()],
    )
    seen: list[int] = []
    work = write_archive(
        info, tmp_path / "m.kvx", source, planned, 4096, lambda done, _all: seen.append(done)
    )
    assert asyncio.run(work).blocks == 95
    assert (source.calls, source.most) == (10, 1)
    assert seen == [*range(10, 91, 10), 95], "in order"
