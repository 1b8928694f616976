"""Sampling: greedy, temperature, top-k, top-p, and draws that depend on (seed, token number) alone."""

from typing import Any

import pytest
import torch

from engine_adapter.engine.errors import InvalidRequest
from engine_adapter.engine.sampler import SamplingParams, choose, sample

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -5.0])


def draws(params: SamplingParams, count: int = 300) -> list[int]:
    return [choose(LOGITS, params, index) for index in range(count)]


def test_greedy_takes_the_best() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert sample(logits, [SamplingParams(), SamplingParams(seed=9)], [0, 5]) == [1, 3]


def test_a_draw_depends_on_seed_and_number_only() -> None:
    """Elsewhere a request's tokens changed with the other requests in its batch."""
    hot = SamplingParams(temperature=1.5, seed=42)
    alone = [sample(LOGITS[None], [hot], [n])[0] for n in range(50)]
    noise = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    others = [SamplingParams(temperature=0.7, seed=s) for s in (1, 42, 3)]
    crowd = torch.cat([noise[:2], LOGITS[None], noise[2:]])
    company = [sample(crowd, [*others[:2], hot, others[2]], [9, n, n, 0])[2] for n in range(50)]
    assert alone == company
    assert alone != [
        sample(LOGITS[None], [SamplingParams(temperature=1.5, seed=43)], [n])[0] for n in range(50)
    ]


def test_draws_follow_the_distribution() -> None:
    counts = torch.bincount(torch.tensor(draws(SamplingParams(temperature=1.0), 4000)), minlength=5) / 4000
    torch.testing.assert_close(counts, torch.softmax(LOGITS, 0), atol=0.03, rtol=0)


def test_top_k_and_top_p_leave_out_the_tail() -> None:
    assert set(draws(SamplingParams(temperature=5.0, top_k=2))) == {1, 2}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.8))) == {1, 2}  # 0.64 + 0.24
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.5))) == {1}
    assert set(draws(SamplingParams(temperature=5.0, top_k=100))) == {0, 1, 2, 3, 4}
    assert set(draws(SamplingParams(temperature=1e-4))) == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)
