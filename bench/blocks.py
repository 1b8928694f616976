"""The blocks that benchmarks store: one tiny geometry, real hash chains, and filling a daemon with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Namespace, SealResult, Session
from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.geometry import Geometry, LayerGroup
from kvstore.identity import hash_blocks
from kvstore.moves import Grant, Outcome, SealOutcome
from kvstore.wire.packed import COPY, SEAL

__all__ = ["ANSWER_S", "LARGE", "SMALL", "chains", "copies_of", "fill", "parts", "seals_of", "store_chain"]

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

SMALL = Geometry(groups=(LayerGroup(layers=1, kv_heads=1, head_dim=32, block_tokens=16),), dtype="float32")
"""Blocks of 4 KiB: what is looked up and leased does not depend on their size, and a million of them fit."""
LARGE = Geometry(groups=(LayerGroup(layers=30, kv_heads=3, head_dim=64, block_tokens=32),), dtype="float32")
"""Blocks of SmolLM2-135M in float32: 1,474,560 bytes."""

ANSWER_S = 30.0
"""How long an answer of a busy daemon is waited for."""


def parts(geometry: Geometry, model: str) -> Mapping[str, bytes]:
    """A namespace for benchmarks."""
    return {
        "model": model.encode(),
        "weights": b"none",
        "dtype": geometry.dtype.encode(),
        "block_tokens": str(geometry.block_tokens).encode(),
        "groups": repr(geometry.groups).encode(),
    }


def chains(key: bytes, blocks: int, length: int, *, seed: int) -> list[U64]:
    """Hash chains of prompts of random tokens, `length` blocks each and the last one shorter: `blocks` in all."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(0, blocks, length):
        # One token a block is enough; from all there can be, or chains would share their first blocks by chance.
        tokens = rng.integers(0, 1 << 32, min(length, blocks - at), dtype=np.uint32)
        made.append(hash_blocks(key, bytes(16), tokens, 1))
    return made


def seals_of(
    namespace: int, hashes: U64, slots: NDArray[np.uint32], generations: NDArray[np.uint32]
) -> NDArray[np.void]:
    """Seals of a whole chain whose blocks are in `slots`: SEAL[n]."""
    seals = np.zeros(len(hashes), dtype=SEAL)
    seals["slot"], seals["generation"] = slots, generations
    seals["namespace"], seals["depth"] = namespace, np.arange(len(hashes))
    seals["hash"] = hashes
    seals["parent"][1:] = hashes[:-1]
    return seals


def copies_of(
    sources: U32, source_generations: U32, targets: U32, target_generations: U32
) -> NDArray[np.void]:
    """Copies that are done: COPY[n]."""
    copies = np.zeros(len(sources), dtype=COPY)
    copies["source"], copies["source_generation"] = sources, source_generations
    copies["target"], copies["target_generation"] = targets, target_generations
    return copies


def store_chain(session: Session, namespace: Namespace, chain: U64, lease: int) -> Grant:
    """Stores one chain that is not cached as an engine does, without computing anything. Its slots are held afterwards.

    Raises: DeadlineExceeded when the daemon does not answer; KvstoreError when it has no slot for a block.
    """
    grant = session.acquire(namespace, lease, chain).result(ANSWER_S)
    fresh = grant.outcomes == Outcome.MISS
    if not fresh.all():
        counts = np.bincount(grant.outcomes, minlength=len(Outcome)).tolist()
        found = ", ".join(f"{count} {Outcome(i).name}" for i, count in enumerate(counts) if count)
        raise KvstoreError(f"of {len(chain)} new blocks all should be to fill, and are {found}")
    session.step(seals=seals_of(namespace.handle, chain, grant.hbm_slots, grant.hbm_generations))
    _await_seals(session, len(chain))
    return grant


def fill(session: Session, namespace: Namespace, wanted: Iterable[U64]) -> int:
    """Stores chains and releases them. How many blocks they have. Raises as `store_chain` does."""
    stored = 0
    for lease, chain in enumerate(wanted):
        session.drop_hbm(store_chain(session, namespace, chain, lease + 1).hbm_slots)
        session.step()
        stored += len(chain)
    return stored


def _await_seals(session: Session, count: int) -> None:
    deadline = time.monotonic() + ANSWER_S
    answered = 0
    while answered < count:
        if not session.wait(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"{count - answered} seals were not answered within {ANSWER_S:g} s")
        for event in session.poll():
            if isinstance(event, SealResult):
                answered += len(event.outcomes)
                if event.outcomes.any():
                    raise KvstoreError(
                        f"{int((event.outcomes != SealOutcome.PUBLISHED).sum())} blocks were not published"
                    )
