"""A request that waits for a moment to see how fast a disk is: what that says of the disk."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from engine_adapter.copying.copier import Copier
from engine_adapter.loading.choice import LoadChoice
from engine_adapter.loading.plans import LoadPlans
from kvstore.client import Namespace, Session
from kvstore.layout import Tier
from kvstore.planning.planner import Plan, Way

BLOCKS, SLOT_BYTES, TRIAL_S = 64, 1000, 0.02


class Choice:
    """Computes everything, but for a trial of the disk."""

    def __init__(self) -> None:
        self.measured: list[tuple[Tier, int, float]] = []

    def plan(self, tiers: object, num_tokens: int, block_tokens: int) -> Plan:
        return Plan(
            way=Way.COMPUTE,
            cached_blocks=BLOCKS,
            load_end=0,
            meet=BLOCKS,
            expected_s=0.5,
            load_all_s=2.0,
            compute_all_s=0.5,
        )

    def trial_s(self, plan: Plan) -> float:
        return TRIAL_S

    def queued_bytes(self) -> int:
        return 0

    def queue_cancelled(self) -> None:
        pass

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        self.measured.append((tier, nbytes, seconds))


@pytest.mark.parametrize("came", [0, BLOCKS // 4, BLOCKS])
def test_a_trial_that_brings_nothing_says_nothing(came: int) -> None:
    """A disk whose first call took longer than the trial counted as a hundred times slower than it was."""
    tiers, now = np.full(BLOCKS, Tier.NVME, dtype=np.uint8), [100.0]
    session = SimpleNamespace(
        hbm=SimpleNamespace(slot_bytes=SLOT_BYTES),
        match=lambda namespace, prompt: SimpleNamespace(tiers=tiers.copy()),
        cancel=lambda lease: None,
    )
    choice = Choice()
    plans = LoadPlans(
        cast(Session, session),
        cast(Namespace, SimpleNamespace(block_tokens=16)),
        cast(Copier, None),
        cast(LoadChoice, choice),
        count(100),
        lambda: now[0],
    )
    prompt = np.zeros((BLOCKS, 2), dtype=np.uint64)
    ask = plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    assert ask is not None
    assert (ask.private, ask.wait_s) == (False, TRIAL_S)
    now[0] += TRIAL_S
    tiers[:came] = Tier.DRAM
    plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    found = [(Tier.NVME, came * SLOT_BYTES, pytest.approx(TRIAL_S))] if came else []
    assert choice.measured == found
