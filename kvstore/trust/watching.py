"""The canary: blocks that are served are checksummed again, and taken back where they are not what they were.

Learns the checksum of each block in DRAM (`kvstore.tables.checksums`) that nobody who stored it has said: a mover says
it with each block that it reads or writes, and for a block that never went through one at its first check. A check is a
move of kind VERIFY, which touches no disk and holds nothing: its answer counts only where the slot is still under the
state word that it had. A write whose checksum is another than the known one has read bytes that changed in DRAM, and is
not believed either. Found is what no other tier's checksum can find: memory that changed under a complete block.

Sessions that compare what they load find the same, and what a mover has read without looking at it. The latter is the
disk's fault, found before anything was computed from it: the block ends in DRAM and storage, and that is all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.layout import GENERATION_SHIFT, NONE, Tier
from kvstore.moves import U8, U32, U64, MoveKind, MoveStatus
from kvstore.recorder import Event, Recorder
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tiering.flights import Flights
from kvstore.trust.distrusting import busy_rows, distrust
from kvstore.trust.lineage import descendants

__all__ = ["Watching", "WrongBlock"]

_CHECKS_AT_ONCE = 8
_MEMORY = (Tier.HBM, Tier.DRAM)
_READ = (Tier.DRAM, Tier.NVME)
_EVERYWHERE = (Tier.HBM, Tier.DRAM, Tier.NVME)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBlock:
    """A block whose bytes changed."""

    hash: bytes
    where: str
    """What a person is told: where it was found, and by what."""


class Watching:
    """Checks of blocks in DRAM, and what is done about wrong ones."""

    __slots__ = (
        "_checking",
        "_condemned",
        "_flights",
        "_misread",
        "_state",
        "_taken_back",
        "_wrong",
    )

    def __init__(self, state: StoreState, flights: Flights) -> None:
        self._state = state
        self._flights = flights
        self._checking = 0
        self._condemned: list[tuple[U32, U64, U64]] = []
        """Rows that were CLEARED and have copies still, their words since, and before."""
        self._wrong: list[WrongBlock] = []
        self._misread: list[WrongBlock] = []
        self._taken_back: list[bytes] = []
        state.counters["wrong_blocks"] += 0
        state.counters["canary_blocks"] += 0

    def record_to(self, recorder: Recorder) -> None:
        """Has the store's decisions noted there from now on."""
        self._state.recorder = recorder

    def take_wrong(self) -> list[WrongBlock]:
        """Wrong blocks that were found since the last call."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def take_misread(self) -> list[WrongBlock]:
        """Blocks that storage gave wrong and a load has found, since the last call."""
        misread, self._misread = self._misread, []
        return misread

    def take_taken_back(self) -> list[bytes]:
        """Hashes of blocks that disks had and nobody is to find again, since the last call: their trailers stay."""
        taken, self._taken_back = self._taken_back, []
        return taken

    # -- checks

    def due(self, limit: int) -> U32:
        """DRAM slots to be checked by the mover that asks, few at a time; they are under way from now on."""
        count = min(limit, _CHECKS_AT_ONCE - self._checking)
        if count <= 0:
            return NO_SLOTS
        sampled = self._state.sample.take(count)
        if not sampled:  # mostly; it is asked after every message
            return NO_SLOTS
        slots = np.unique(np.array(sampled, dtype=np.uint32))
        slots = slots[self._state.dram.sealed(slots)]
        self._checking += len(slots)
        return slots

    def learn(self, path: int, ids: U64, statuses: U8, checksums: U64) -> U8:
        """A mover's answers, before they are acted on: the statuses that are to be believed, [n].

        `checksums` is [n, 2] xxh3-128 of the payloads. Ids that are not in flight on this path are passed over.
        """
        flights, named = self._flights.look(path, ids)
        ok = statuses[named] == MoveStatus.OK
        flights, named = flights[ok], named[ok]
        slots = flights["dram"]
        words = self._state.dram.state[slots]
        same = words == flights["dram_word"]
        same |= (flights["kind"] == MoveKind.READ) & (
            words >> GENERATION_SHIFT == flights["dram_word"] >> GENERATION_SHIFT
        )
        flights, named, slots, words = flights[same], named[same], slots[same], words[same]
        sums, table = checksums[named], self._state.checksums
        read = flights["kind"] == MoveKind.READ
        differs = ~read & table.known(slots) & (table.of(slots) != sums).any(axis=1)
        unread = flights["unread"] != 0
        looked_at = ~differs & ~unread
        table.note(slots[looked_at], sums[looked_at])
        table.note_unread(slots[read & unread], sums[read & unread])
        self._state.counters["canary_blocks"] += int(np.count_nonzero(flights["kind"] == MoveKind.VERIFY))
        if not differs.any():
            return statuses
        self.differed(slots[differs], "its checksum has changed")
        believed = statuses.copy()
        believed[named[differs & (flights["kind"] == MoveKind.WRITE)]] = MoveStatus.CANCELLED
        return believed

    def ended(self, checks: int) -> None:
        """So many checks were answered, or will never be."""
        self._checking -= checks

    # -- taking back

    def differed(self, slots: U32, how: str) -> None:
        """These SEALED DRAM slots do not hold what their checksums are of; `how` that was found, for people."""
        slots = np.unique(slots)
        # Once: another may have said it, or the block been taken back, while a mover is at work on it. The checksum
        # stays, for all who hold the slot and have not compared yet.
        slots = slots[self._state.table.sealed(self._state.dram.row[slots])]
        if not len(slots):
            return
        unread = self._state.checksums.unread(slots)
        if unread.any():
            self._read_wrong(slots[unread])
        if not unread.all():
            self._changed(slots[~unread], how)

    def loads_differed(self, slots: U32) -> None:
        """As `differed`, by the word of a session that has loaded them. Mostly none."""
        if not len(slots):
            return
        self.differed(slots, "its load found other bytes than were stored")

    def _changed(self, slots: U32, how: str) -> None:
        """DRAM does not hold any more what it held when these blocks came."""
        rows = self._state.dram.row[slots]
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            block = self._state.columns.hash[row].tobytes()
            self._state.recorder.note(Event.WRONG, Tier.DRAM, 1, slot, block=block)
            self._wrong.append(WrongBlock(hash=block, where=f"DRAM slot {slot}: {how}"))
        self._state.counters["wrong_blocks"] += len(slots)
        self._condemn(rows, _MEMORY)

    def _read_wrong(self, slots: U32) -> None:
        """What a mover has read, and nobody has used, is not what was written: as a read that it finds corrupt."""
        state = self._state
        rows = state.dram.row[slots]
        state.counters["checksum_failures"] += len(rows)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            block = state.columns.hash[row].tobytes()
            state.recorder.note(Event.WRONG, Tier.NVME, 1, slot, block=block)
            self._misread.append(WrongBlock(hash=block, where=self._on_disk(int(state.columns.nvme[row]))))
        busy = busy_rows(state, rows)
        if not busy.all():
            distrust(state, rows[~busy], state.words(rows[~busy]), _READ)
        if busy.any():
            before = state.words(rows[busy])
            state.table.clear(rows[busy])
            self._condemned.append((rows[busy], state.words(rows[busy]), before))

    def _on_disk(self, nvme: int) -> str:
        """Where storage has a block, for people."""
        if nvme == NONE:
            return "storage, which has let go of it"
        pool = self._state.nvme
        path = int(pool.devices(np.array([nvme], dtype=np.uint32))[0])
        return f"path {path}, extent {int(pool.extent[nvme])}, slot {nvme}"

    def report(self, namespace: int, hashes: U64, detail: str) -> int:
        """Somebody who knows better says that these blocks are wrong: they end in every tier. Returns how many."""
        rows = np.unique(self._state.table.find(hashes, namespace))
        rows = rows[self._state.table.sealed(rows)]
        if not len(rows):
            return 0
        for row in rows.tolist():
            block = self._state.columns.hash[row].tobytes()
            self._state.recorder.note(Event.WRONG, Tier.HBM, 1, block=block)
            self._wrong.append(WrongBlock(hash=block, where=detail))
        self._state.counters["wrong_blocks"] += len(rows)
        self._condemn(rows, _EVERYWHERE)
        return len(rows)

    def _condemn(self, rows: U32, tiers: tuple[Tier, ...]) -> None:
        """Takes these SEALED rows back in these tiers, and in all what may have been computed from them.

        Nothing of it is a hit from now on, also for who takes the tables over; what a mover is at work on has its slots
        until that has ended. A row of which nothing will be left is such a one from the beginning.
        """
        state = self._state
        below = descendants(state.table, rows)
        external = [session.id for session in state.sessions if session.device is None]
        state.suspects.add(external, state.columns.hash[np.concatenate((rows, below))])
        if tiers != _EVERYWHERE:
            stays = state.nvme.sealed(state.columns.nvme[rows]) & ~busy_rows(state, rows)
            if stays.any():
                distrust(state, rows[stays], state.words(rows[stays]), tiers)
            rows = rows[~stays]
        gone = np.concatenate((rows, below))
        before = state.words(gone)
        on_disk = gone[state.columns.nvme[gone] != NONE]
        self._taken_back += [block.tobytes() for block in state.columns.hash[on_disk]]
        state.table.clear(gone)
        state.counters["distrusted_blocks"] += len(gone)
        for load in state.loads:  # it may be about to enter more of what was computed from them
            for namespace in np.unique(state.columns.namespace[gone]).tolist():
                load.clear(namespace)
        self._condemned.append((gone, state.words(gone), before))
        self.carry_out()

    def carry_out(self) -> None:
        """Takes condemned blocks back: those that a mover is at work on once it has ended. Cheap without any."""
        if not self._condemned:
            return
        state = self._state
        rows, words, before = (np.concatenate(parts) for parts in zip(*self._condemned, strict=True))
        still = state.words(rows) == words
        busy = still & busy_rows(state, rows)
        self._condemned = [(rows[busy], words[busy], before[busy])] if busy.any() else []
        ready = still & ~busy
        if ready.any():
            distrust(state, rows[ready], before[ready], _EVERYWHERE)
