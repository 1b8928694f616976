"""Services with blocks in them whose bytes are a function of their hashes, and what it takes to look at them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, Namespace, Session, Targets, connect
from kvstore.geometry import opaque_geometry
from kvstore.layout import touch_key
from kvstore.moves import Outcome
from kvstore.transfer.archive import BlockHead, payload_checksum
from kvstore.transfer.sealer import Sealer
from tests.support.blocks import block_bytes, expected
from tests.support.daemon import DEADLINE_S, Service, wait_for

SLOT_BYTES = 16_384
TOKENS = 1  # `opaque_geometry` has blocks of one token


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def parts(model: str = "m", **more: bytes) -> dict[str, bytes]:
    """A namespace named by its model."""
    named = {"model": model.encode(), "weights": b"1", "dtype": b"float32", "block_tokens": b"1"}
    return {**named, "groups": b"1x1x1", **more}


@dataclass(slots=True)
class Engine:
    """A session without HBM, and one namespace."""

    client: Client
    session: Session
    namespace: Namespace

    def hashes(self, prompt: Sequence[int]) -> NDArray[np.uint64]:
        """[n, 2] of the full blocks of a prompt."""
        return self.namespace.chain(prompt).hashes

    def store(self, prompt: Sequence[int]) -> NDArray[np.uint64]:
        """Every block of a prompt, in DRAM; their hashes."""
        hashes = self.hashes(prompt)
        blocks = []
        for depth, block in enumerate(hashes):
            payload = block_bytes(block, SLOT_BYTES).tobytes()
            head = BlockHead(
                hash=block.tobytes(),
                parent=hashes[depth - 1].tobytes() if depth else bytes(16),
                depth=depth,
                touch=int(touch_key(1, np.array([depth], dtype=np.uint32))[0]),
                checksum=payload_checksum(payload),
            )
            blocks.append((head, memoryview(payload)))
        assert Sealer(self.session, self.namespace).seal(blocks) == len(hashes)
        return hashes

    def served(self, hashes: NDArray[np.uint64]) -> int:
        """Leading blocks that are served; each must be what was stored."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            pending = self.session.acquire(self.namespace, 1, hashes)
            grant = pending.result(30)
            if Outcome.PROMOTING not in grant.outcomes or time.monotonic() > until_s:
                break
            pending.abandon()
            self.session.step()
            time.sleep(0.02)
        hits = grant.outcomes == Outcome.HIT_DRAM
        run = len(hits) if hits.all() else int(hits.argmin())
        for block, slot in zip(hashes[:run], grant.dram_slots[:run].tolist(), strict=True):
            assert expected(block, self.session.dram.view(slot)), "a wrong block was served"
        pending.abandon()
        self.session.step()
        return run


@contextmanager
def engine(service: Service, wanted: dict[str, bytes]) -> Iterator[Engine]:
    """An engine that is attached for the length of the block. All of DRAM is there: a start adds it bit by bit, and
    what is stored into a part of it puts out what was stored before."""

    def all_there() -> bool:
        dram = service.tier("dram")
        return dram.allocated_bytes + service.config.dram_extent_bytes > dram.capacity_bytes

    wait_for("all of DRAM", all_there)
    with connect(service.socket) as client:
        targets = Targets(credit=0, room=64)
        with client.attach("engine", opaque_geometry(SLOT_BYTES), None, targets=targets) as session:
            yield Engine(client, session, session.open_namespace(wanted))


def many(seed: int, blocks: int) -> list[int]:
    """A prompt of so many blocks."""
    return np.random.default_rng(seed).integers(0, 50_000, blocks * TOKENS).tolist()
