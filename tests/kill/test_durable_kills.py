"""Kills the daemon under a load of writes, and then looks that whatever a Flush acknowledged is there, byte for byte.

Every eighth time the keeper dies too: then memory is gone and the disk alone answers. $KVSTORE_TEST_DURABLE_KILLS
sets how many kills (default 60), $KVSTORE_TEST_SEED which moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from engine_adapter.base import RequestId
from kvstore.errors import KvstoreError
from kvstore.layout import NONE
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kill.harness import HANG_S, progress, told_where, within_capacity
from tests.support.daemon import Service, small_config, start, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

KILLS = int(os.environ.get("KVSTORE_TEST_DURABLE_KILLS", "60"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
PROMPT_BLOCKS = 12
NVME_BYTES = -(-KILLS // 125) * 1024 * MIB
"""Some 13 prompts are written a kill: the disk has room for twice what all kills together interrupt."""
MOST_BLOCKS = NVME_BYTES // (20 * 1024)
"""Slots of 16 KiB with their trailers."""
MOST_PROMPTS = MOST_BLOCKS // PROMPT_BLOCKS * 3 // 4
"""As many never fill the disk, so that nothing may be evicted."""
EVERYTHING = 8  # one kill in so many is the keeper's too
CHECKED_A_KILL = 6

pytestmark = [pytest.mark.kill, pytest.mark.timeout(3600)]


class Writer:
    """One engine that stores prompts nobody has seen, flushes, and remembers what was acknowledged."""

    def __init__(self, engine: Driver, rng: random.Random) -> None:
        self.acknowledged: list[list[int]] = []
        self.checked = 0
        self.answered = threading.Event()
        """Set at each answer that acknowledges."""
        self._engine = engine
        self._rng = rng
        self.number = 0
        """Prompts written."""
        self._stored: list[list[int]] = []  # since the last flush that was answered

    def step(self) -> None:
        """Stores a few prompts and flushes; an answer that the daemon did not live to give acknowledges nothing."""
        for _ in range(self._rng.randint(1, 4)):
            if self.number < MOST_PROMPTS:
                self.number += 1
                tokens = [
                    self.number,
                    *(self._rng.randrange(1 << 20) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)),
                ]
                self._run(tokens)
                self._stored.append(tokens)
            elif self.acknowledged:
                self._run(self._rng.choice(self.acknowledged))
        self._flush()

    def _flush(self) -> None:
        """What is in DRAM when a daemon is asked is acknowledged once that same daemon has answered.

        In that daemon's DRAM: a session that has lost its daemon, whether it has noticed or not, shows the memory of
        the one before, and the next one's answer, which knows nothing of it, was once taken for an acknowledgement. So
        the daemon itself is asked what it has of each.
        """
        stored, self._stored = self._stored, []
        with contextlib.suppress(KvstoreError):
            pid = self._engine.client.describe().pid
            if not self.is_connected():
                return
            asked = [
                tokens for tokens in stored if self._in_dram(tokens) and self._known(tokens) == PROMPT_BLOCKS
            ]
            reply = self._engine.client.flush(HANG_S)
            if reply.pending_blocks == 0 and pid == self._engine.client.describe().pid:
                self.acknowledged += asked
                self.answered.set()

    def check(self, prompts: list[list[int]]) -> None:
        """Each is a hit in full, with the bytes that were sealed."""
        for tokens in prompts:
            # Before it is asked for: what is computed anew is there afterwards, whatever was lost.
            assert (known := self._known(tokens)) == PROMPT_BLOCKS, (
                f"acknowledged, and {known} blocks are left"
            )
            cached = self._run(tokens)
            while cached != PROMPT_BLOCKS * BLOCK_TOKENS and not self.disks_answer():
                # A mover that starts on a busy machine is slow enough to be taken for a disk that hangs: a miss.
                wait_for("the disks", self.disks_answer, HANG_S)
                cached = self._run(tokens)
            assert cached == PROMPT_BLOCKS * BLOCK_TOKENS, f"all known, and {cached} tokens of it were a hit"
            self.checked += 1

    def _known(self, tokens: list[int]) -> int:
        """Leading blocks of the prompt that the daemon of now has."""
        request = pb.ExplainRequest(
            token=self._engine.session._attachment._reply.token,
            namespace=self._engine.namespace.handle,
            hashes=self._engine.namespace.chain(tokens).hashes[:PROMPT_BLOCKS].tobytes(),
        )
        told: pb.ExplainReply = self._engine.client.call("Explain", request)
        return int(told.cached_blocks)

    def is_connected(self) -> bool:
        """Whether the engine has a session with the daemon of now."""
        self._engine.blocks.end_step()
        return self._engine.session.connected

    def disks_answer(self) -> bool:
        """Whether blocks that only a disk has can be had now."""
        return all(path.in_service and not path.hangs for path in self._engine.client.stats().paths)

    def sample(self) -> list[list[int]]:
        """The newest, which the kill was closest to, and some of all."""
        some = self._rng.sample(self.acknowledged, min(CHECKED_A_KILL, len(self.acknowledged)))
        return self.acknowledged[-CHECKED_A_KILL:] + some

    def _in_dram(self, tokens: list[int]) -> bool:
        """Whether all of its blocks are: what found no room there is never a flush's business."""
        tables = self._engine.session._attachment.memory.tables
        rows = tables.index.find(self._engine.namespace.chain(tokens).hashes[:PROMPT_BLOCKS])
        return bool((rows != NONE).all() and (tables.columns.dram[rows] != NONE).all())

    def _run(self, tokens: list[int]) -> int:
        """One request from admission to release; its cached tokens."""
        engine, request = self._engine, RequestId(f"r{time.monotonic_ns()}")
        engine.enqueue(request, tokens)
        admission = engine.admit(request, HANG_S)
        engine.fill(request, admission.cached_tokens)
        engine.blocks.end_step()
        with contextlib.suppress(AssertionError):
            engine.settle(HANG_S)
        engine.check(request, PROMPT_BLOCKS)
        engine.release(request)
        return admission.cached_tokens


class Services:
    """The service, and those that came before it."""

    def __init__(self, folder: Path) -> None:
        self._config = small_config(
            folder,
            nvme_bytes=NVME_BYTES,
            dram_bytes=16 * MIB,
            dram_extent_bytes=4 * MIB,
            max_rows=max(65_536, 2 * MOST_BLOCKS),
        )
        self._log = folder / "kv.log"
        self._all: list[Service] = []
        self._start()
        wait_for("a ready daemon", lambda: self.now.stats().ready, HANG_S)

    @property
    def now(self) -> Service:
        """The one that runs."""
        return self._all[-1]

    def _start(self) -> None:
        self._all.append(start(self._config, self._log))

    def kill_later(self, delay_s: float, answered: threading.Event | None, *pids: int) -> threading.Thread:
        """SIGKILL of these after `delay_s`, or after it and the moment of the next answer to a flush.

        Where the keeper is one of them, nobody but us starts the next.
        """

        def kill() -> None:
            time.sleep(delay_s)
            if answered is not None:
                answered.clear()
                answered.wait(HANG_S)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if len(pids) > 1:
                self._start()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def stop(self) -> None:
        """All have ended."""
        for service in reversed(self._all):
            service.stop()


def test_what_a_flush_acknowledged_outlives_every_kill(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    services = Services(tmp_path)
    began = time.monotonic()
    try:
        with attached(services.now.socket, "writer", patience_s=HANG_S, away_s=HANG_S) as engine:
            writer = Writer(engine, rng)
            for kill in range(KILLS):
                with told_where(f"kill {kill} of {KILLS}, seed {SEED}"):
                    _kill_once(services, writer, rng, everything=kill % EVERYTHING == EVERYTHING - 1)
                    assert services.now.faults() == []
                    assert services.now.stats().counters.get("evictions_nvme", 0) == 0, (
                        "the disk is never full"
                    )
                    within_capacity(services.now.config)
                if kill % 20 == 19 or kill == KILLS - 1:
                    progress(
                        f"{kill + 1} kills in {time.monotonic() - began:.0f} s, {len(writer.acknowledged)} prompts "
                        f"acknowledged, {writer.checked} checked"
                    )
            writer.check(writer.acknowledged)
            assert len(writer.acknowledged) >= KILLS
            assert writer.number < MOST_PROMPTS, "the last kills met no writes: the disk is to be larger"
    finally:
        services.stop()


def _kill_once(services: Services, writer: Writer, rng: random.Random, *, everything: bool) -> None:
    """Writes until the kill has happened, and looks at what must be there once somebody answers again."""
    daemon, keeper = services.now.daemon_pid, services.now.keeper_pid
    answered = writer.answered if rng.random() < 0.5 else None  # at an answer, or in the middle of something
    killing = services.kill_later(rng.random() * 0.6, answered, *([keeper] if everything else []), daemon)
    while killing.is_alive():
        writer.step()
    killing.join()
    wait_for(
        "another daemon", lambda: services.now.daemon_pid != daemon and services.now.stats().ready, HANG_S
    )
    wait_for("the session", writer.is_connected, HANG_S)
    # Until its mover is there a disk is read by nobody, and what it alone has is a miss.
    wait_for("the disks", writer.disks_answer, HANG_S)
    writer.check(writer.sample())
