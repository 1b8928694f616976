"""Requests that are told apart by more than their tokens, against the real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.daemon import started
from tests.vllm.processes import MODEL, Answer, Vllm, connector, service_config

BLOCK, RANK = 32, 8


def adapter(folder: Path, seed: int) -> str:
    """A LoRA of the model's key projections, so that it changes KV, in the files that vLLM loads."""
    model = json.loads((MODEL / "config.json").read_text())
    hidden, keys = model["hidden_size"], model["num_key_value_heads"] * model["head_dim"]
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.05
        weights[f"{name}.lora_B.weight"] = torch.randn(keys, RANK, generator=random) * 0.05
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_adapter_called_as_a_salt_is_neither_that_salt_nor_another_adapter_of_its_name(
    place: Path, prompt: Callable[[int, int], list[int]]
) -> None:
    config = service_config(place)
    tokens = prompt(1, 4 * BLOCK + 5)
    first, second = adapter(place / "first", 1), adapter(place / "second", 2)
    ways: tuple[dict[str, object], ...] = (
        {},
        {"salts": ["x"]},
        {"loras": [["x", 1, first]]},
        {"loras": [["x", 2, second]]},
        {"salts": ["x"], "loras": [["x", 1, first]]},
    )
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    with started(config) as service, Vllm(place / "vllm.log", connector=connector(config), **options) as vllm:

        def ask() -> list[Answer]:
            """Each way by itself; vLLM's own cache knows none of them from before."""
            vllm.reset()
            return [vllm.generate(tokens, **way)[0] for way in ways]

        assert vllm.call("attached")
        cold, warm = ask(), ask()
        assert [one.cached for one in cold] == [0] * len(ways)
        assert [one.cached for one in warm] == [4 * BLOCK] * len(ways)
        assert [one.tokens for one in warm] == [one.tokens for one in cold]
        assert (
            len({one.said for one in warm}) == 3
        )  # the model's, and one an adapter: a salt changes nothing computed
        assert service.faults() == []
