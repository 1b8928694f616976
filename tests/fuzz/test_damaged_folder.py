"""Any damage to any file of an NVMe path: the next start refuses in one line, or serves nothing but right blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.config import Durability, ServeConfig
from kvstore.units import MIB
from kvstore.wire.packed import COPY, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.fuzz.rig import examples
from tests.fuzz.test_two_clients import Memory
from tests.support.blocks import block_bytes, expected
from tests.support.daemon import DEADLINE_S, Service, small_config, start, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient

BLOCKS = 20
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """A path that was closed in order, with blocks of known bytes on it."""

    config: ServeConfig
    pristine: Path
    files: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the service looks for it."""
        return Path(self.config.nvme[0].path)

    def renew(self) -> None:
        """Puts it back as it was."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.pristine, self.folder)


KEEPING = [durability for durability in Durability if durability.value != "none"]


@pytest.fixture(scope="module", params=KEEPING, ids=[durability.value for durability in KEEPING])
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = replace(small_config(Path(name), nvme_bytes=64 * MIB), durability=request.param)
        with started(config) as service:
            client = RawClient(service.socket).begin()
            fill(client)
            service.call(
                "Clear", pb.ClearRequest(namespace=client.namespace("cleared").namespace), service="admin"
            )
            client.close()
        pristine = Path(name) / "pristine"
        shutil.move(config.nvme[0].path, pristine)
        files = [str(file.relative_to(pristine)) for file in pristine.rglob("*") if file.is_file()]
        yield Stored(
            config, pristine, tuple(sorted(files, key=lambda name: (name != "index/data.mdb", name)))
        )


def prompt(client: RawClient) -> NDArray[np.uint64]:
    return client.chain(range(BLOCKS * 4))


def fill(client: RawClient) -> None:
    """Blocks in DRAM and on disk, whose bytes follow from their hashes."""
    memory = Memory(client)
    hashes, granted = client.fill(range(BLOCKS * 4))
    client.step(want_room=BLOCKS)
    slots = client.receive_body("slots").slots
    room, generations = u32_of(slots.dram_slots)[:BLOCKS], u32_of(slots.dram_generations)[:BLOCKS]
    for hash_, slot in zip(hashes, room.tolist(), strict=True):
        memory.dram(slot)[:] = block_bytes(hash_, SLOT_BYTES)
    copies = np.zeros(BLOCKS, dtype=COPY)
    copies["source"], copies["source_generation"] = granted.hbm, granted.hbm_generations
    copies["target"], copies["target_generation"] = room, generations
    client.step(stores=copies.tobytes(), released_dram=room.astype("<u4").tobytes())
    client.acquire(hashes[:0])
    reply = client.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
    assert reply.pending_blocks == 0
    memory.close()


def damages(stored: Stored) -> st.SearchStrategy[tuple[str, str, int, bytes]]:
    """File, what is done to it, where (of a million), and with which bytes."""
    kinds = ["overwrite", "overwrite", "cut", "zero page", "append", "delete", "empty", "folder"]
    return st.tuples(
        st.sampled_from(stored.files),
        st.sampled_from(kinds),
        st.integers(0, 999_999),
        st.binary(min_size=1, max_size=64),
    )


def damage(file: Path, how: str, where: int, data: bytes) -> None:
    if not file.is_file():
        return
    size = file.stat().st_size
    at = size * where // 1_000_000
    if file.suffix == ".kv" and where % 2:  # half of it in the trailers of blocks that are there
        at = (where % BLOCKS) * (SLOT_BYTES + PAGE) + SLOT_BYTES + where % 112
    with file.open("r+b") as stream:
        stream.seek(at)
        if how == "overwrite":
            stream.write(data)
        elif how == "cut":
            stream.truncate(at)
        elif how == "zero page":
            stream.seek(at // PAGE * PAGE)
            stream.write(bytes(min(PAGE, size)))
        elif how == "append":
            stream.seek(0, os.SEEK_END)
            stream.write(data * 64)
        elif how == "empty":
            stream.truncate(0)
    if how in ("delete", "folder"):
        file.unlink()
    if how == "folder":
        file.mkdir()


def test_damage_is_a_miss_or_a_refusal(stored: Stored) -> None:
    """A flipped bit in one of the small files ended the start with a traceback."""

    @examples(2)
    @given(done=st.lists(damages(stored), min_size=1, max_size=3))
    def attack(done: list[tuple[str, str, int, bytes]]) -> None:
        stored.renew()
        for name, how, where, data in done:
            damage(stored.folder / name, how, where, data)
        judge(stored.config)

    attack()


def test_without_damage_everything_is_a_hit(stored: Stored) -> None:
    stored.renew()
    assert judge(stored.config) == BLOCKS


def judge(config: ServeConfig) -> int:
    """Starts on what is there. How many blocks were served, each with its bytes; 0 for a start that was refused."""
    log = Path(config.socket).with_suffix(".log")
    log.unlink(missing_ok=True)
    service = start(config, log)
    try:
        wait_for("a ready daemon or a refusal", lambda: not service.alive() or service.stats().ready)
        said = log.read_text(errors="replace")
        assert "Traceback" not in said, said[-3000:]
        if not service.alive():
            assert service.process.returncode not in (0, None)
            assert "kvstore" in said, "a refusal says why"
            return 0
        return served(service)
    finally:
        service.stop()
        said = log.read_text(errors="replace")
        assert "Traceback" not in said, said[-3000:]


def served(service: Service) -> int:
    """Reads all that it can; every byte is compared."""
    client = RawClient(service.socket).begin()
    memory = Memory(client)
    try:
        hashes = prompt(client)
        for lease in range(10, 60):
            granted = client.acquire(hashes, lease=lease)
            if pb.OUTCOME_PROMOTING not in granted.outcomes:
                break
            client.receive_body("changed")
        hits = 0
        for block, outcome in enumerate(granted.outcomes):
            if outcome == pb.OUTCOME_HIT_DRAM:
                assert expected(hashes[block], memory.dram(int(granted.dram[block]))), (
                    f"block {block} is wrong"
                )
                hits += 1
            else:
                assert outcome in (pb.OUTCOME_MISS, pb.OUTCOME_LATER), f"block {block}: outcome {outcome}"
        assert service.faults() == []
        assert service.stats().counters.get("internal_errors_total", 0) == 0
        return hits
    finally:
        with contextlib.suppress(Exception):
            client.stub.Detach(pb.DetachRequest(token=client.token), timeout=5)
        memory.close()
        client.close()
