"""Moves between one DRAM extent and one slab, for the tests of tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import MoveKind
from kvstore.wire.packed import MOVE
from tiers.dram import DramTier

SLOT_BYTES = 16384
STRIDE = SLOT_BYTES + 4096
DRAM = 3  # extent
NVME = 7  # extent
SLABS = 4 << 20


class Harness:
    """One DRAM extent of 64 slots, and moves between its slots and slots of the NVMe extent."""

    def __init__(self, memory: DramTier, rng: np.random.Generator) -> None:
        self.memory = memory
        self.rng = rng
        self.next_id = 1
        self.bytes = np.frombuffer(memory.view(DRAM), dtype=np.uint8).reshape(-1, SLOT_BYTES)

    def fill(self, slot: int) -> NDArray[np.uint8]:
        """Random bytes in a DRAM slot; a copy of them."""
        self.bytes[slot] = self.rng.integers(0, 256, SLOT_BYTES, dtype=np.uint8)
        return self.bytes[slot].copy()

    def moves(
        self, kind: MoveKind, dram: list[int], nvme: list[int], generation: int = 1
    ) -> NDArray[np.void]:
        """Moves of blocks whose identity follows from the NVMe slot."""
        moves = np.zeros(len(dram), dtype=MOVE)
        moves["id"] = np.arange(self.next_id, self.next_id + len(dram))
        self.next_id += len(dram)
        moves["kind"] = kind
        moves["dram_extent"], moves["nvme_extent"] = DRAM, NVME
        moves["dram_slot"], moves["nvme_slot"] = dram, nvme
        moves["dram_offset"] = np.array(dram, dtype=np.uint64) * SLOT_BYTES
        moves["nvme_offset"] = np.array(nvme, dtype=np.uint64) * STRIDE
        moves["length"], moves["generation"] = SLOT_BYTES, generation
        moves["depth"] = nvme
        for i, slot in enumerate(nvme):
            moves["hash"][i] = (slot + 1, 99)
            moves["parent"][i] = (slot, 99)
        moves["ns_digest"] = (5, 6)
        return moves

    def write(self, dram: list[int], nvme: list[int], generation: int = 1) -> NDArray[np.void]:
        return self.moves(MoveKind.WRITE, dram, nvme, generation)

    def read(self, dram: list[int], nvme: list[int], generation: int = 1) -> NDArray[np.void]:
        return self.moves(MoveKind.READ, dram, nvme, generation)

    def moves_for(self, slots: list[int]) -> NDArray[np.void]:
        """Writes of DRAM slots to the NVMe slots of the same numbers."""
        return self.write(slots, slots)

    def moves_back(self, slots: list[int]) -> NDArray[np.void]:
        """Reads of those into the DRAM slots 32 further on."""
        return self.read([slot + 32 for slot in slots], slots)


@contextmanager
def opened() -> Iterator[Harness]:
    """A harness with memory of its own."""
    memory = DramTier()
    memory.create(DRAM, 64 * SLOT_BYTES)
    made = Harness(memory, np.random.default_rng(20261129))
    yield made
    del made.bytes
    memory.close()
