"""Drives a block manager as an engine's scheduler would, with memory writes in place of kernels; checks every byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from engine_adapter.base import Admission, RequestId
from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.copying.copier import Copier, TwinCopier
from engine_adapter.loading.layer_groups import LayerGroups
from kvstore.client import Client, Compares, DeviceSpec, Namespace, Session, connect
from kvstore.identity import HashChain
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.blocks import block_bytes, expected
from tests.support.daemon import DEADLINE_S, wait_for
from tests.support.worker import ALWAYS, BLOCK_TOKENS, PARTS, geometry

__all__ = ["Driver", "attached"]


class Driver:
    """One engine thread over one session."""

    def __init__(
        self,
        client: Client,
        session: Session,
        copier: Copier,
        *,
        parts: Mapping[str, bytes] = PARTS,
        patience_s: float = 5.0,
        away_s: float = 30.0,
        layer_groups: LayerGroups | None = None,
    ) -> None:
        self.client = client
        self.session = session
        self.copier = copier
        self.blocks = KvstoreBlockManager(
            session,
            parts,
            copier,
            patience_s=patience_s,
            away_s=away_s,
            loads=ALWAYS,
            layer_groups=layer_groups,
        )
        self.namespace: Namespace = session.open_namespace(parts)
        self.tokens: dict[RequestId, list[int]] = {}

    def enqueue(self, name: str, tokens: list[int]) -> RequestId:
        request = RequestId(name)
        self.tokens[request] = list(tokens)
        self.blocks.enqueue(request, self.tokens[request])
        return request

    def try_admit(self, request: RequestId) -> Admission | None:
        return self.blocks.admit(request, len(self.tokens[request]))

    def admit(self, request: RequestId, timeout_s: float = DEADLINE_S) -> Admission:
        """Asks until it is admitted; checks the cached pages."""
        deadline = time.monotonic() + timeout_s
        while (admission := self.try_admit(request)) is None:
            assert time.monotonic() < deadline, f"{request} was not admitted within {timeout_s} s"
            self.blocks.end_step()
            self.blocks.wait(0.05)
        if admission.arriving is None:
            self.check(request, admission.cached_tokens // BLOCK_TOKENS)
        return admission

    def chain(self, request: RequestId) -> HashChain:
        return self.namespace.chain(self.tokens[request])

    def fill(self, request: RequestId, begin_tokens: int, end_tokens: int | None = None) -> None:
        """The kernels of a chunk, and its commit."""
        end = len(self.tokens[request]) if end_tokens is None else end_tokens
        pages, hashes = self.blocks.pages(request), self.chain(request).hashes
        memory = np.asarray(self.blocks.kv_pages())
        for block in range(begin_tokens // BLOCK_TOKENS, end // BLOCK_TOKENS):
            memory[pages[block]] = block_bytes(hashes[block], memory.shape[1])
        if end % BLOCK_TOKENS:
            memory[pages[end // BLOCK_TOKENS]] = 0xAA
        self.blocks.commit(request, self.tokens[request], end)

    def decode(self, request: RequestId, token: int) -> bool:
        """One step of decoding; False where there was no page."""
        tokens = self.tokens[request]
        tokens.append(token)
        if not self.blocks.reserve(request, len(tokens)):
            tokens.pop()
            return False
        self.fill(request, len(tokens) - 1)
        return True

    def await_credit(self, pages: int = 1) -> None:
        """Returns when so many pages are in hand: on a busy machine an engine decodes faster than they come."""

        def there() -> bool:
            self.blocks.end_step()
            return self.session.credit_in_hand >= pages

        wait_for(f"{pages} pages in hand", there)

    def check(self, request: RequestId, blocks: int) -> None:
        """The first `blocks` pages hold exactly what their hashes say."""
        pages, hashes = self.blocks.pages(request), self.chain(request).hashes
        memory = np.asarray(self.blocks.kv_pages())
        for block in range(blocks):
            assert expected(hashes[block], memory[pages[block]]), f"block {block} of {request} is wrong"

    def run(self, name: str, tokens: list[int], *, timeout_s: float = DEADLINE_S) -> Admission:
        """One request from beginning to end; afterwards its blocks are sealed and nothing is held for it."""
        request = self.enqueue(name, tokens)
        admission = self.admit(request, timeout_s)
        self.fill(request, admission.cached_tokens)
        self.blocks.end_step()
        self.settle()
        self.check(request, len(tokens) // BLOCK_TOKENS)
        self.release(request)
        return admission

    def release(self, request: RequestId) -> None:
        self.blocks.release(request)
        self.tokens.pop(request, None)
        self.blocks.end_step()

    def settle(self, timeout_s: float = DEADLINE_S) -> None:
        """Every seal is answered and every copy reported."""
        deadline = time.monotonic() + timeout_s
        while not self.session.quiet() or self.blocks.write_through.backlog_blocks:
            assert time.monotonic() < deadline, "seals or copies did not end"
            self.session.step()
            time.sleep(0.002)
        assert self.session.drain(timeout_s)

    def held(self) -> pb.SessionStats:
        """What the daemon says that this session holds."""
        token_name = self.session.name
        return next(s for s in self.client.stats().sessions if s.name == token_name)

    def await_nothing_used(self, timeout_s: float = DEADLINE_S) -> None:
        """The daemon agrees that nothing but the slots in hand is held."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.blocks.end_step()
            held = self.held()
            hbm, dram = self.session.credit_in_hand, self.session.room_in_hand
            if (held.held_hbm_slots, held.held_dram_slots) == (hbm, dram):
                return
            assert time.monotonic() < deadline, (
                f"held {held.held_hbm_slots} HBM and {held.held_dram_slots} DRAM slots, {hbm} and {dram} in hand"
            )
            time.sleep(0.01)


@contextmanager
def attached(
    socket: str,
    name: str,
    *,
    pages: int = 128,
    device: int = 0,
    patience_s: float = 5.0,
    away_s: float = 30.0,
    copier: Copier | None = None,
    layer_groups: LayerGroups | None = None,
) -> Iterator[Driver]:
    """An engine attached to the daemon at `socket`, with so many pages of 16 KiB. It compares what it loads."""
    shape = geometry()
    spec = DeviceSpec(hbm_bytes=pages * shape.slot_bytes, index=device)
    copier = copier or TwinCopier()
    with (
        connect(socket, timeout_s=DEADLINE_S) as client,
        client.attach(name, shape, spec, compares=Compares.LOADS) as session,
    ):
        try:
            yield Driver(
                client, session, copier, patience_s=patience_s, away_s=away_s, layer_groups=layer_groups
            )
        finally:
            copier.close(10.0)
