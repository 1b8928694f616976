"""A worker that owns HBM of any kind, without an engine: stores a prompt, or says what it finds of it.

KIND is "twin", "cuda" or "fake-cuda", the code of a GPU over a driver of host memory.

python -m tests.support.hbm_worker SOCKET KIND fill|find [--sharing none] [--blocks N] [--hbm-bytes N] [--timeout S]

Prints one JSON line, then waits to be killed or for the end of its input (`fill`) or ends (`find`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import DeviceSpec, Namespace, Session, Targets, connect
from kvstore.errors import KvstoreError
from kvstore.moves import Grant, Outcome
from kvstore.units import MIB
from kvstore.wire.packed import COPY, SEAL
from tests.support.blocks import block_bytes, expected
from tests.support.fake_cuda import FakeCuda
from tests.support.worker import BLOCK_TOKENS, PARTS, geometry
from tiers import hbm
from tiers.base import Sharing

__all__ = ["HbmWorker", "finds", "main"]

_TIMEOUT_S = 30.0


class HbmWorker:
    """A worker that has filled its HBM with a prompt's blocks, which are in DRAM too, and waits."""

    def __init__(self, socket: str, kind: str, *arguments: str) -> None:
        command = _command(socket, kind, "fill", *arguments)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended early"
        self.report: dict[str, Any] = json.loads(line)

    def kill(self) -> None:
        """SIGKILL, and reaps it."""
        self.process.kill()
        self.process.wait(_TIMEOUT_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def finds(socket: str, kind: str, *arguments: str) -> dict[str, Any]:
    """What a new worker finds of the prompt: {"outcomes": {name: blocks}, "wrong": blocks} or {"error": …}."""
    done = subprocess.run(
        _command(socket, kind, "find", *arguments), stdout=subprocess.PIPE, timeout=_TIMEOUT_S * 2, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _command(socket: str, kind: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.hbm_worker", socket, kind, *arguments]


def _fill(session: Session, namespace: Namespace, hashes: NDArray[np.uint64]) -> dict[str, Any]:
    grant = session.acquire(namespace, 1, hashes).result(_TIMEOUT_S)
    assert set(grant.outcomes.tolist()) == {Outcome.MISS}, grant.outcomes
    for hash_, slot in zip(hashes, grant.hbm_slots.tolist(), strict=True):
        session.hbm.write(slot, block_bytes(hash_, session.hbm.slot_bytes).tobytes())
    seals = np.zeros(len(hashes), dtype=SEAL)
    seals["slot"], seals["generation"] = grant.hbm_slots, grant.hbm_generations
    seals["namespace"], seals["hash"] = namespace.handle, hashes
    seals["depth"] = np.arange(len(hashes))
    seals["parent"][1:] = hashes[:-1]
    session.step(seals=seals)
    assert session.drain(_TIMEOUT_S)
    copied = _write_through(session, grant)
    return {
        "copied": copied,
        "pages": session.hbm.num_pages,
        "device": session.hbm.device,
        "sharing": session.hbm.tier.sharing.value,
        "slots": grant.hbm_slots.tolist(),
        "slot_bytes": session.hbm.slot_bytes,
    }


def _write_through(session: Session, grant: Grant) -> int:
    """Copies as many blocks into DRAM as there is room for; how many."""
    until = time.monotonic() + _TIMEOUT_S
    count = len(grant.hbm_slots)
    while session.room_in_hand < count and time.monotonic() < until:
        session.step()
        time.sleep(0.01)
    room = session.take_room(count)
    assert room is not None
    for source, target in zip(grant.hbm_slots.tolist(), room.slots.tolist(), strict=True):
        session.dram.view(target)[:] = np.frombuffer(session.hbm.read(source), dtype=np.uint8)
    copies = np.zeros(count, dtype=COPY)
    copies["source"], copies["source_generation"] = grant.hbm_slots, grant.hbm_generations
    copies["target"], copies["target_generation"] = room.slots, room.generations
    session.step(stores=copies, dropped_dram=room.slots)
    assert session.drain(_TIMEOUT_S)
    return count


def _find(session: Session, namespace: Namespace, hashes: NDArray[np.uint64]) -> dict[str, Any]:
    grant = session.acquire(namespace, 1, hashes).result(_TIMEOUT_S)
    wrong = 0
    for at, outcome in enumerate(grant.outcomes.tolist()):
        if outcome == Outcome.HIT_HBM:
            page = np.frombuffer(session.hbm.read(int(grant.hbm_slots[at])), dtype=np.uint8)
        elif outcome == Outcome.HIT_DRAM:
            page = session.dram.view(int(grant.dram_slots[at]))
        else:
            continue
        wrong += not expected(hashes[at], page)
    outcomes = Counter(Outcome(outcome).name for outcome in grant.outcomes.tolist())
    return {"outcomes": dict(outcomes), "wrong": wrong, "pages": session.hbm.num_pages}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("kind")
    parser.add_argument("mode", choices=["fill", "find"])
    parser.add_argument("--sharing", type=Sharing, default=Sharing.DESCRIPTORS)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--hbm-bytes", type=int, default=64 * MIB)
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S)
    given = parser.parse_args()
    if given.kind == "fake-cuda":
        hbm._load_driver = FakeCuda
    kind = given.kind.removeprefix("fake-")
    device = DeviceSpec(hbm_bytes=given.hbm_bytes, kind=kind, sharing=given.sharing)
    with connect(given.socket, timeout_s=given.timeout) as client:
        try:
            session = client.attach(
                "hbm worker", geometry(), device, targets=Targets(credit=0, room=given.blocks)
            )
        except KvstoreError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
            return
        with session:
            namespace = session.open_namespace(PARTS)
            hashes = namespace.chain(np.arange(given.blocks * BLOCK_TOKENS)).hashes
            work = _fill if given.mode == "fill" else _find
            print(json.dumps({"pid": os.getpid(), **work(session, namespace, hashes)}), flush=True)
            if given.mode == "fill":
                sys.stdin.buffer.read()  # ends with the test, whatever becomes of that


if __name__ == "__main__":
    main()
