"""A torch-free engine under load: block bytes are a function of the hash, so it can tell every wrong byte.

    python -m tests.support.worker --socket S --name N --seed 1 [--hbm-bytes B] [--seconds T] …

It runs requests through the real adapter: admits, checks every cached page byte for byte, "computes" the rest in
chunks, commits, decodes some tokens, aborts and preempts at random, and checks all its pages again before it lets them
go (a page reused under a living holder shows there). DRAM is checked before each load. One JSON object a line on
standard output: ready, progress (twice a second), wrong (a byte that is not what it must be), done. Exit 3 when
anything was wrong. SIGTERM ends it in order.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from engine_adapter.base import RequestId
from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.copying.copier import Copier, CopyBatch, Direction, TwinCopier
from engine_adapter.loading.choice import ChoiceSettings, LoadMode
from kvstore.client import Client, Compares, DeviceSpec, Session, connect
from kvstore.errors import KvstoreError
from kvstore.geometry import Geometry, LayerGroup
from kvstore.identity import HashChain
from kvstore.tables.checksums import Checksums
from tests.support.blocks import block_bytes, describes_itself, expected, private_bytes
from tests.support.workload import Workload

BLOCK_TOKENS = 4
PARTS: Mapping[str, bytes] = {
    "model": b"torch-free",
    "weights": b"1",
    "dtype": b"float32",
    "block_tokens": b"4",
    "groups": b"1x1x128",
}
CHANCES = {"finish": 0.86, "abort": 0.08, "preempt": 0.06}
_RESTART_S = 300.0
"""A daemon that is killed in each of seven lives one after the other is away for 23 s here, twice that elsewhere."""


def geometry(slot_kib: int = 16) -> Geometry:
    """One layer, one head: slots of `slot_kib` KiB."""
    head_dim = slot_kib * 1024 // (2 * BLOCK_TOKENS * 4)
    group = LayerGroup(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=BLOCK_TOKENS)
    return Geometry(groups=(group,), dtype="float32")


def say(event: str, **values: object) -> None:
    """One JSON line."""
    sys.stdout.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")
    sys.stdout.flush()


ALWAYS = ChoiceSettings(mode=LoadMode.ALWAYS)
"""What is there is a hit, however slow the disk is: tests of the store look for what it kept."""


@dataclass(slots=True)
class Counts:
    """What the worker has seen."""

    requests: int = 0
    aborted: int = 0
    preempted: int = 0
    hit_blocks: int = 0
    filled_blocks: int = 0
    checked_blocks: int = 0
    checked_loads: int = 0
    unread_loads: int = 0
    wrong: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)


class CheckingCopier:
    """Checks in DRAM what is about to be loaded, but for what a mover has read and nobody has looked at.

    That is compared when it has been loaded, and checked in its page before it is used.
    """

    def __init__(self, inner: Copier, counts: Counts, session: Session) -> None:
        self._inner = inner
        self._counts = counts
        self._session = session

    def takes_sums(self, nbytes: int) -> bool:
        return self._inner.takes_sums(nbytes)

    def submit(self, batch: CopyBatch) -> bool:
        if batch.direction is Direction.LOAD:
            assert batch.dram_slots is not None
            unread = Checksums(self._session.tables.tables.columns).unread(batch.dram_slots)
            self._counts.unread_loads += int(unread.sum())
            for address in batch.sources[~unread].tolist():
                page = np.ctypeslib.as_array((ctypes.c_uint8 * batch.nbytes).from_address(address))
                self._counts.checked_loads += 1
                if not describes_itself(page):
                    self._counts.wrong += 1
                    say("wrong", where="dram", head=page[:32].tobytes().hex())
        return self._inner.submit(batch)

    def cancel(self, batch: CopyBatch) -> bool:
        return self._inner.cancel(batch)

    def computing(self, steps: int) -> None:
        self._inner.computing(steps)

    def close(self, timeout_s: float) -> None:
        self._inner.close(timeout_s)


@dataclass(slots=True)
class Running:
    """One request of the worker."""

    id: RequestId
    number: int
    tokens: list[int]
    chain: HashChain
    end_tokens: int
    fate: str
    fate_step: int
    computed: int = 0
    admitted: bool = False
    steps: int = 0
    since: float = field(default_factory=time.monotonic)


class Worker:
    """The loop of an engine, with memory writes in place of kernels."""

    def __init__(
        self,
        blocks: KvstoreBlockManager,
        new_chain: Callable[[], HashChain],
        workload: Workload,
        counts: Counts,
    ) -> None:
        self._blocks = blocks
        self._new_chain = new_chain
        self._workload = workload
        self._counts = counts
        self._pages = np.asarray(blocks.kv_pages())
        self._live: list[Running] = []
        self._next = 0

    def step(self, max_running: int) -> None:
        """One engine step: new requests, admissions, kernels, commits."""
        while len(self._live) < max_running:
            self._add()
        computed = False
        for request in tuple(self._live):
            request.steps += 1
            if request.fate != "finish" and request.steps >= request.fate_step:
                self._end_early(request)
            elif not request.admitted:
                self._admit(request)
            else:
                computed = True
                self._compute(request)
        self._blocks.end_step()
        if not computed:
            self._blocks.wait(0.05)

    def drain(self) -> None:
        """Lets everything go."""
        for request in self._live:
            self._blocks.release(request.id)
        self._live.clear()
        self._blocks.end_step()

    def oldest_s(self) -> float:
        """How long the oldest request has been there."""
        return max((time.monotonic() - request.since for request in self._live), default=0.0)

    def _add(self) -> None:
        tokens = self._workload.prompt()
        self._next += 1
        request = Running(
            id=RequestId(f"r{self._next}"),
            number=self._next,
            tokens=tokens,
            chain=self._new_chain(),
            end_tokens=len(tokens) + self._workload.integer(1, 3 * BLOCK_TOKENS),
            fate=self._workload.choose(CHANCES),
            fate_step=self._workload.integer(1, 12),
        )
        request.chain.extend(tokens)
        self._live.append(request)
        self._blocks.enqueue(request.id, tokens, ahead=sum(not live.admitted for live in self._live) - 1)
        if request.number % 4 == 0:
            self._blocks.prepare(request.id)
        self._counts.requests += 1

    def _end_early(self, request: Running) -> None:
        self._blocks.release(request.id)
        if request.fate == "abort":
            self._counts.aborted += 1
            self._live.remove(request)
            return
        self._counts.preempted += 1
        request.fate, request.admitted, request.computed = "finish", False, 0
        self._blocks.enqueue(request.id, request.tokens)

    def _admit(self, request: Running) -> None:
        admission = self._blocks.admit(request.id, len(request.tokens))
        if admission is None:
            return
        request.admitted = True
        request.computed = admission.cached_tokens
        cached = admission.cached_tokens // BLOCK_TOKENS
        self._counts.hit_blocks += cached
        for tier, tokens in admission.cached_by_tier.items():
            self._counts.by_tier[tier] = self._counts.by_tier.get(tier, 0) + tokens // BLOCK_TOKENS
        self._check(request, cached, "admit")

    def _compute(self, request: Running) -> None:
        """A chunk of the prompt, or one decoded token."""
        if request.computed == len(request.tokens):
            if len(request.tokens) >= request.end_tokens:
                self._finish(request)
                return
            request.tokens.append(len(request.tokens) % 251)
        if not self._blocks.reserve(request.id, len(request.tokens)):
            self._blocks.release(request.id)  # no page now: preempted
            request.admitted, request.computed = False, 0
            self._blocks.enqueue(request.id, request.tokens)
            return
        end = min(len(request.tokens), request.computed + 5 * BLOCK_TOKENS)
        if end > request.chain.num_tokens:
            request.chain.extend(request.tokens[request.chain.num_tokens : end])
        self._write(request, request.computed, end)
        request.computed = end
        self._blocks.commit(request.id, request.tokens, end)

    def _write(self, request: Running, begin: int, end: int) -> None:
        """The kernels: full blocks get the bytes of their hash, the last one bytes of its own."""
        pages = self._blocks.pages(request.id)
        for block in range(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            page = self._pages[pages[block]]
            if (block + 1) * BLOCK_TOKENS <= end:
                page[:] = block_bytes(request.chain.hashes[block], len(page))
                self._counts.filled_blocks += 1
            else:
                page[:] = private_bytes(request.number, block, len(page))

    def _check(self, request: Running, blocks: int, when: str) -> None:
        pages = self._blocks.pages(request.id)
        for block in range(blocks):
            page = self._pages[pages[block]]
            self._counts.checked_blocks += 1
            if not expected(request.chain.hashes[block], page):
                self._counts.wrong += 1
                say(
                    "wrong",
                    where="hbm",
                    when=when,
                    request=request.id,
                    block=block,
                    page=int(pages[block]),
                    head=page[:32].tobytes().hex(),
                    hash=request.chain.hashes[block].tobytes().hex(),
                    consistent=describes_itself(page),
                )

    def _finish(self, request: Running) -> None:
        self._check(request, request.computed // BLOCK_TOKENS, "finish")
        if request.computed % BLOCK_TOKENS:
            block = request.computed // BLOCK_TOKENS
            page = self._pages[self._blocks.pages(request.id)[block]]
            if not (page == private_bytes(request.number, block, len(page))).all():
                self._counts.wrong += 1
                say("wrong", where="private", request=request.id, block=block)
        self._blocks.release(request.id)
        self._live.remove(request)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--name", default="load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", type=int, default=1)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--hbm-bytes", type=int, default=8 << 20)
    parser.add_argument("--slot-kib", type=int, default=16)
    parser.add_argument("--running", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--max-blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=3600.0)
    return parser.parse_args()


def _attach(client: Client, name: str, shape: Geometry, device: DeviceSpec) -> Session:
    """Attaches; asks again while the daemon is being restarted."""
    until = time.monotonic() + _RESTART_S
    while True:
        try:
            return client.attach(name, shape, device, compares=Compares.LOADS)
        except KvstoreError as error:
            if time.monotonic() > until:
                raise
            say("refused", error=str(error))
            time.sleep(0.1)


def main() -> int:
    """Runs until the time is over or SIGTERM."""
    options = _arguments()
    counts = Counts()
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    client = connect(options.socket, timeout_s=10.0)
    device = DeviceSpec(hbm_bytes=options.hbm_bytes, index=options.device)
    session = _attach(client, options.name, geometry(options.slot_kib), device)
    copier = CheckingCopier(TwinCopier(), counts, session)
    blocks = KvstoreBlockManager(session, PARTS, copier, patience_s=2.0, away_s=_RESTART_S, loads=ALWAYS)
    workload = Workload(
        family=options.family,
        seed=options.seed,
        block_tokens=BLOCK_TOKENS,
        conversations=options.conversations,
        max_blocks=options.max_blocks,
    )
    worker = Worker(blocks, session.open_namespace(PARTS).chain, workload, counts)
    say("ready", pages=session.hbm.num_pages)
    end = time.monotonic() + options.seconds
    told = 0.0
    while not stop and time.monotonic() < end:
        worker.step(options.running)
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            say("progress", oldest_s=worker.oldest_s(), connected=session.connected, **_values(counts))
    worker.drain()
    copier.close(10.0)
    session.step()
    session.close()
    client.close()
    say("done", **_values(counts))
    return 3 if counts.wrong else 0


def _values(counts: Counts) -> dict[str, object]:
    return {name: getattr(counts, name) for name in Counts.__slots__}


if __name__ == "__main__":
    sys.exit(main())
