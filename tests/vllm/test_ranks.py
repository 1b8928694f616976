"""A vLLM of two tensor-parallel ranks, each a process: half of every block is each rank's, and one session is all's."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.support.daemon import started
from tests.vllm.processes import Vllm, connector, service_config
from tests.vllm.tiny_llama import VOCABULARY, write_tiny_llama

BLOCK = 32
ATTACH_S = 90.0  # three processes that start at once
SHARED_BYTES = 256 << 20
"""What vLLM's ranks want to find free in /dev/shm before they start, to speak to each other: 240 MiB, and a little."""


def prompt(seed: int, tokens: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(tokens)]


def test_two_ranks_store_and_load_their_halves_of_each_block(place: Path) -> None:
    """Cold, vLLM's own cache, the store, after the daemon's death, and in another vLLM, of which one stores nothing."""
    free_bytes = shutil.disk_usage("/dev/shm").free
    if free_bytes < SHARED_BYTES:
        pytest.skip(
            f"vLLM's ranks want 240 MiB of /dev/shm, which has {free_bytes >> 20} (docker run --shm-size=1g)"
        )
    model = place / "tiny"
    write_tiny_llama(model)
    config = service_config(place)
    options = {
        "model": str(model),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
    }
    known, new = prompt(1, 10 * BLOCK + 5), prompt(2, 3 * BLOCK + 1)
    with started(config) as service:
        with Vllm(place / "one.log", connector=connector(config), **options) as vllm:
            assert vllm.call("attached", ATTACH_S), vllm.tail()
            (session,) = service.stats().sessions  # one makes the calls; ranks map what it is given
            assert session.members == 3
            cold, local = vllm.generate(known)[0], vllm.generate(known)[0]
            assert (cold.cached, local.cached) == (0, 10 * BLOCK)
            assert cold.tokens == local.tokens
            vllm.reset()
            stored = vllm.generate(known)[0]
            assert (stored.cached, stored.said) == (10 * BLOCK, local.said)
            assert vllm.call("stats")["loaded_blocks"] == 10
            service.kill_daemon()
            vllm.reset()
            assert vllm.call("attached", ATTACH_S), vllm.tail()
            again = vllm.generate(known)[0]
            assert (again.cached, again.said) == (10 * BLOCK, local.said)
        with Vllm(place / "two.log", connector=connector(config, cache="read"), **options) as vllm:
            assert vllm.call("attached", ATTACH_S), vllm.tail()
            other = vllm.generate(known)[0]
            assert (other.cached, other.said) == (10 * BLOCK, local.said)
            assert vllm.generate(new)[0].cached == 0
            assert vllm.call("stats")["stored_blocks"] == 0
            vllm.reset()
            assert vllm.generate(new)[0].cached == 0
        assert service.faults() == []
