"""Logits against transformers on the same weights: every position, fp32, at most 1e-3 apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_adapter.engine.attention.sdpa import SdpaAttention
from tests.engine_adapter.engine import tiny
from tests.engine_adapter.engine.harness import Sequences, random_tokens

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-3
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-tied": {},
    "multi-head-untied": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim-from-hidden": {"head_dim": None, "hidden_size": 96},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope-llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "rope-parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
}


def reference(folder: Path, tokens: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_option_matches_transformers(variant: str, tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path, VARIANTS[variant])
    tokens = random_tokens(200, seed=1)
    sequences = Sequences(tiny.load(folder).model)
    sequences.add(tokens)
    (logits,) = sequences.forward(SdpaAttention(sequences.pool), [(0, 200)])
    torch.testing.assert_close(logits, reference(folder, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("batch", [1, 8])
def test_prompts_of_many_lengths_match_in_chunks_and_behind_cached_prefixes(
    tiny_folder: Path, batch: int
) -> None:
    """Exactly k blocks, shorter than a block, one token over; cold, chunked, and sharing the pages of another."""
    model = tiny.load(tiny_folder).model
    prompts = [random_tokens(n, seed=n) for n in (32, 5, 33, 1, 150, 64, 17, 100)][:batch]
    sequences = Sequences(model, num_pages=256)
    backend = SdpaAttention(sequences.pool)
    for prompt in prompts:
        sequences.add(prompt)
    cold: list[list[Tensor]] = [[] for _ in prompts]
    for end in range(23, 184, 23):  # chunks that end anywhere, all prompts in one batch
        work = [
            (i, min(end, len(p)))
            for i, p in enumerate(prompts)
            if sequences.requests[i].num_computed < len(p)
        ]
        if work:
            for (i, _), logits in zip(work, sequences.forward(backend, work), strict=True):
                cold[i].append(logits)
    warm = []
    for i, prompt in enumerate(prompts):
        cached = (len(prompt) - 1) // 16 * 16
        warm.append((sequences.add(prompt, cached=cached, prefix_of=i), len(prompt)))
    hits = sequences.forward(backend, warm)
    for prompt, chunks, hit in zip(prompts, cold, hits, strict=True):
        expected = reference(tiny_folder, prompt)
        torch.testing.assert_close(torch.cat(chunks), expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(hit, expected[-len(hit) :], atol=TOLERANCE, rtol=0)


def test_runners_give_the_last_logits_of_finished_prompts_only(tiny_folder: Path) -> None:
    model = tiny.load(tiny_folder).model
    prompts = [random_tokens(n, seed=n) for n in (100, 30, 7)]
    for name in ("flat", "tiled"):
        sequences = Sequences(model)
        for prompt in prompts:
            sequences.add(prompt)
        runner = getattr(sequences, name)()
        first = sequences.run(runner, [(0, 64), (1, 30), (2, 7)])
        second = sequences.run(runner, [(0, 100)])
        expected = torch.stack([reference(tiny_folder, prompt)[-1] for prompt in prompts])
        torch.testing.assert_close(torch.cat((second, first)), expected, atol=TOLERANCE, rtol=0)


def test_a_bf16_folder_loads_and_computes_in_fp32(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path, dtype=torch.bfloat16)
    loaded = tiny.load(folder)
    assert loaded.model.dtype is torch.float32
    tokens = random_tokens(50, seed=3)
    sequences = Sequences(loaded.model)
    sequences.add(tokens)
    (logits,) = sequences.forward(SdpaAttention(sequences.pool), [(0, 50)])
    torch.testing.assert_close(logits, reference(folder, tokens), atol=TOLERANCE, rtol=0)
