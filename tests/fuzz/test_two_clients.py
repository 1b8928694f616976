"""Two sessions, one hostile: whatever that one says, the other finds its blocks, with the bytes that it stored."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import grpc
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvstore.units import MIB
from kvstore.wire.packed import COPY, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.fuzz.rig import Target, examples, messages
from tests.fuzz.test_streams import ANSWERS, everything, plausible
from tests.support.blocks import block_bytes, expected
from tests.support.daemon import DEADLINE_S, small_config, started
from tests.support.raw_client import BLOCK_TOKENS, SLOT_BYTES, Granted, RawClient

PROMPT_BLOCKS = 6
PROMPTS = 4


class Memory:
    """What a client maps: the bytes of its slots."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._maps: dict[tuple[str, int], mmap.mmap] = {}

    def hbm(self, slot: int) -> NDArray[np.uint8]:
        """[SLOT_BYTES] of an HBM slot."""
        return self._slot("hbm", 0, slot, self._client.hbm)

    def dram(self, slot: int) -> NDArray[np.uint8]:
        """[SLOT_BYTES] of a DRAM slot."""
        return self._slot("dram", 1, slot, self._client.dram_fds)

    def _slot(self, tier: str, pool: int, slot: int, fds: dict[int, int]) -> NDArray[np.uint8]:
        columns = self._client.columns
        assert columns is not None
        extent = int(columns.pools[pool].extent[slot])
        while extent not in fds:
            assert self._client.receive_descriptor() is not None
        if (tier, extent) not in self._maps:
            self._maps[tier, extent] = mmap.mmap(fds[extent], os.fstat(fds[extent]).st_size)
        offset = (slot - int(columns.extent_slot_base[extent])) * SLOT_BYTES
        return np.frombuffer(self._maps[tier, extent], dtype=np.uint8, count=SLOT_BYTES, offset=offset)

    def close(self) -> None:
        """Forgets the mappings; views of them may still be about."""
        self._maps.clear()


class TwoClients(RuleBasedStateMachine):
    """The honest one stores prompts with bytes that follow from their hashes; the hostile one says anything."""

    target: ClassVar[Target]

    @initialize(transport=st.sampled_from(["rpc", "frames"]))
    def both_attach(self, transport: Literal["rpc", "frames"]) -> None:
        """Both on the same device, so that their slots lie in the same extents."""
        self.honest = self.target.client("frames", hbm_slots=64)
        self.memory = Memory(self.honest)
        self.hostile = self.target.client(transport, hbm_slots=0)
        self.own = self.hostile.fill(range(9000, 9016))
        self.lease = 10
        self.held: dict[int, tuple[NDArray[np.uint64], Granted]] = {}

    def _prompt(self, number: int) -> NDArray[np.uint64]:
        begin = 1000 * number
        return self.honest.chain(range(begin, begin + PROMPT_BLOCKS * BLOCK_TOKENS))

    @precondition(lambda self: len(self.held) < PROMPTS)
    @rule(number=st.integers(0, PROMPTS - 1))
    def asked(self, number: int) -> None:
        """The honest one acquires a prompt: hits hold the right bytes, the rest is computed and sealed."""
        if number in self.held:
            return
        hashes = self._prompt(number)
        self.lease += 1
        granted = self.honest.acquire(hashes, lease=self.lease)
        loads: list[int] = []
        for block, outcome in enumerate(granted.outcomes):
            slot = int(granted.hbm[block])
            if outcome == pb.OUTCOME_MISS:
                self.memory.hbm(slot)[:] = block_bytes(hashes[block], SLOT_BYTES)
            elif outcome == pb.OUTCOME_HIT_HBM:
                assert expected(hashes[block], self.memory.hbm(slot)), (
                    f"block {block} of prompt {number} is wrong"
                )
            elif outcome == pb.OUTCOME_HIT_DRAM:
                source = self.memory.dram(int(granted.dram[block]))
                assert expected(hashes[block], source), f"block {block} of prompt {number} is wrong in DRAM"
                self.memory.hbm(slot)[:] = source
                loads.append(block)
        self._finish(hashes, granted, loads)
        self.held[number] = (hashes, granted)

    def _finish(self, hashes: NDArray[np.uint64], granted: Granted, loads: list[int]) -> None:
        if loads:
            copies = np.zeros(len(loads), dtype=COPY)
            copies["source"], copies["source_generation"] = (
                granted.dram[loads],
                granted.dram_generations[loads],
            )
            copies["target"], copies["target_generation"] = granted.hbm[loads], granted.hbm_generations[loads]
            self.honest.step(
                loads=copies.tobytes(), released_dram=granted.dram[loads].astype("<u4").tobytes()
            )
        missed = [at for at, outcome in enumerate(granted.outcomes) if outcome == pb.OUTCOME_MISS]
        if missed:
            outcomes = self.honest.seal(self.honest.seals(hashes, granted)[missed])
            # The hostile one may have taken the hash in a namespace of its own: then nothing is stored.
            assert set(outcomes) <= {pb.SEAL_OUTCOME_PUBLISHED, pb.SEAL_OUTCOME_DUPLICATE}, (
                "what only this session may fill is taken"
            )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def written_through(self, data: st.DataObject) -> None:
        """A prompt that it holds goes to DRAM, and with a flush to disk."""
        number = data.draw(st.sampled_from(sorted(self.held)))
        hashes, granted = self.held[number]
        blocks = [at for at, slot in enumerate(granted.hbm.tolist()) if slot != 0xFFFFFFFF]
        room, generations = self._room(len(blocks))
        count = min(len(room), len(blocks))
        copies = np.zeros(count, dtype=COPY)
        for at in range(count):
            self.memory.dram(int(room[at]))[:] = self.memory.hbm(int(granted.hbm[blocks[at]]))
        copies["source"] = granted.hbm[blocks[:count]]
        copies["source_generation"] = granted.hbm_generations[blocks[:count]]
        copies["target"], copies["target_generation"] = room[:count], generations[:count]
        self.honest.step(stores=copies.tobytes(), released_dram=room.astype("<u4").tobytes())
        self.honest.acquire(hashes[:0])
        if data.draw(st.booleans(), label="flush"):
            self.honest.stub.Flush(pb.FlushRequest(deadline_ms=2000), timeout=DEADLINE_S)

    def _room(self, wanted: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """DRAM slots to fill and their generations: none where the hostile one has them all."""
        self.honest.step(want_room=wanted)
        fence = self.honest.send(acquire=pb.Acquire(namespace=self.honest.ns.namespace, lease=1))
        slots, generations = [b""], [b""]
        while (message := self.honest.receive()).grant.id != fence:
            slots.append(message.slots.dram_slots)
            generations.append(message.slots.dram_generations)
        return u32_of(b"".join(slots)), u32_of(b"".join(generations))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """It has no more use for a prompt; until then its slots held what they should."""
        number = data.draw(st.sampled_from(sorted(self.held)))
        hashes, granted = self.held.pop(number)
        slots = granted.hbm[granted.hbm != 0xFFFFFFFF]
        for block, slot in enumerate(granted.hbm.tolist()):
            if slot != 0xFFFFFFFF:
                assert expected(hashes[block], self.memory.hbm(slot)), "a slot that was held has changed"
        self.honest.release(hbm=slots.tolist())

    @rule(data=st.data())
    def anything_is_said(self, data: st.DataObject) -> None:
        """The hostile one knows every slot, generation and hash of the other."""
        if self.held:
            hashes, granted = next(iter(self.held.values()))
        else:
            hashes, granted = self._prompt(0), self.own[1]
        count = min(len(hashes), len(granted.hbm))
        known = everything(self.honest, hashes[:count], granted, self.hostile, *self.own)
        for message in data.draw(
            st.lists(
                messages(pb.ClientMessage, known) | plausible(known, self.hostile), min_size=1, max_size=6
            ),
            label="said",
        ):
            message.id = self.hostile.next_id
            self.hostile.next_id += 1
            self.hostile.send_raw(message)
        fence = self.hostile.send(acquire=pb.Acquire(namespace=self.hostile.ns.namespace, lease=1))
        while True:
            message = self.hostile.receive()
            if message.WhichOneof("body") == "grant" and message.grant.id == fence:
                return
            if message.WhichOneof("body") == "error":
                assert message.error.code in ANSWERS, message.error

    @rule(how=st.sampled_from(["stream", "resume", "detach"]))
    def the_hostile_one_goes(self, how: str) -> None:
        """It loses its stream, states anything at its resume, or leaves; and comes back."""
        if how == "detach":
            self.target.close(self.hostile)
            self.hostile = self.target.client(hbm_slots=0)
            self.own = self.hostile.fill(range(9000, 9016))
            return
        self.hostile.drop_stream()
        with contextlib.suppress(grpc.RpcError, EOFError, Exception):
            while True:
                self.hostile.receive(timeout_s=5)
        slots = [(slot, 1) for slot in range(12)] if how == "resume" else []
        self.hostile.resume(hbm=slots, dram=slots)
        self.hostile.open_stream()
        self.hostile.ns = self.hostile.namespace("hostile")

    def teardown(self) -> None:
        """Nothing is left of either."""
        if not hasattr(self, "honest"):
            return
        self.memory.close()
        try:
            self.target.check()
        finally:
            for client in (self.honest, self.hostile):
                self.target.close(client)


def test_an_honest_client_stays_correct_beside_a_hostile_one() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=64 * MIB, max_rows=4096, max_namespaces=1024)
        with started(config) as service:
            target = Target(service)
            machine: Any = type("Machine", (TwoClients,), {"target": target})
            run_state_machine_as_test(machine, settings=settings(examples(5), stateful_step_count=25))
            target.empty()
