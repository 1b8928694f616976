"""Deterministic mode: a token's logits have the same bits cold, behind any cached prefix and in any company."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_adapter.engine.attention.tiled import TiledAttention
from engine_adapter.engine.models.llama import Llama
from kvstore.errors import ConfigError
from tests.engine_adapter.engine import tiny
from tests.engine_adapter.engine.harness import Sequences, random_tokens

LENGTH = 209
TOKENS = random_tokens(LENGTH, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Sizes as of a small real model, so that the products take the kernels' blocked and threaded paths."""
    folder = tiny.save_folder(
        tmp_path_factory.mktemp("wide"),
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 4099,
        },
    )
    return tiny.load(folder).model


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def cold(model: Llama, block_tokens: int, tokens: list[int] = TOKENS) -> Tensor:
    sequences = Sequences(model, block_tokens=block_tokens)
    sequences.add(tokens)
    return sequences.run(sequences.tiled(), [(0, len(tokens))])[0]


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_any_cached_prefix_gives_the_bits_of_the_cold_run(model: Llama, block_tokens: int) -> None:
    sequences = Sequences(model, block_tokens=block_tokens, num_pages=256)
    sequences.add(TOKENS)
    runner = sequences.tiled()
    expected = sequences.run(runner, [(0, LENGTH)])
    assert torch.equal(expected[0], cold(model, block_tokens))
    for cached in range(block_tokens, LENGTH, block_tokens):
        warm = sequences.add(TOKENS, cached=cached, prefix_of=0)
        assert torch.equal(sequences.run(runner, [(warm, LENGTH)]), expected), cached


def test_two_threads_agree_among_themselves(model: Llama, two_threads: None) -> None:
    sequences = Sequences(model)
    sequences.add(TOKENS)
    runner = sequences.tiled()
    expected = sequences.run(runner, [(0, LENGTH)])
    warm = sequences.add(TOKENS, cached=112, prefix_of=0)
    sequences.run(runner, [(warm, 150)])
    assert torch.equal(sequences.run(runner, [(warm, LENGTH)]), expected)


DIGEST = """
import hashlib, sys
from tests.engine_adapter.engine import tiny
from tests.engine_adapter.engine.test_deterministic import TOKENS, cold
from pathlib import Path
print(hashlib.sha256(cold(tiny.load(Path(sys.argv[1])).model, 16).numpy().tobytes()).hexdigest())
"""


def test_another_process_computes_the_same_bits(tiny_folder: Path) -> None:
    """A restarted worker serves KV of the one before it beside its own."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", DIGEST, str(tiny_folder)]
    digests = [
        subprocess.run(command, cwd=root, timeout=100, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert digests[0] == digests[1]
    here = cold(tiny.load(tiny_folder).model, 16).numpy().tobytes()
    assert digests[0].strip() == hashlib.sha256(here).hexdigest()


def test_any_cut_into_chunks_gives_the_same_bits(model: Llama) -> None:
    expected = cold(model, 16)
    for step in (9, 40, 64, 100):
        sequences = Sequences(model, seed=step)
        sequences.add(TOKENS)
        runner = sequences.tiled()
        for end in range(step, LENGTH + step, step):
            logits = sequences.run(runner, [(0, min(end, LENGTH))])
        assert torch.equal(logits[0], expected), step


def test_decoded_blocks_are_bitwise_those_of_a_prefill(model: Llama) -> None:
    """Else a later prompt that hits blocks filled while decoding would differ from its cold run."""
    prefilled, decoded = Sequences(model, seed=1), Sequences(model, seed=2)
    for sequences in (prefilled, decoded):
        sequences.add(TOKENS)
    prefilled.run(prefilled.tiled(), [(0, LENGTH)])
    runner = decoded.tiled()
    for end in range(170, LENGTH + 1):
        decoded.run(runner, [(0, end)])
    full = LENGTH // 16
    first = prefilled.pool[torch.from_numpy(prefilled.tables[0][:full]).long()]
    second = decoded.pool[torch.from_numpy(decoded.tables[0][:full]).long()]
    assert torch.equal(first, second)


def test_company_in_the_batch_changes_no_bit(model: Llama) -> None:
    expected = cold(model, 16)
    others = [random_tokens(n, seed=n) for n in (13, 77, 64, 141, 209)]
    sequences = Sequences(model, num_pages=256, seed=5)
    for tokens in (*others, TOKENS):
        sequences.add(tokens)
    me = len(others)
    runner = sequences.tiled()
    sequences.run(runner, [(0, 12), (1, 70), (2, 64), (3, 128), (4, 190), (me, 200)])
    for end in range(201, LENGTH):  # all decode together, some in one tile and some not
        work = [(i, min(sequences.requests[i].num_computed + 1, len(t))) for i, t in enumerate(others)]
        work = [(i, end_i) for i, end_i in work if end_i > sequences.requests[i].num_computed]
        sequences.run(runner, [*work, (me, end)])
    assert torch.equal(sequences.run(runner, [(me, LENGTH)])[0], expected)


def test_two_prefills_that_fill_a_tile_keep_their_bits(model: Llama) -> None:
    """A request behind one cached block and one of a single block have all rows of a tile, the second one's first: the
    KV of each was written into the pages of the other."""
    expected, alone = cold(model, 16), cold(model, 16, TOKENS[:144])
    sequences = Sequences(model, num_pages=256, seed=6)
    sequences.add(TOKENS)
    runner = sequences.tiled()
    sequences.run(runner, [(0, LENGTH)])
    longer = sequences.add(TOKENS, cached=80, prefix_of=0)
    shorter = sequences.add(TOKENS[:144], cached=128, prefix_of=0)
    logits = sequences.run(runner, [(longer, LENGTH), (shorter, 144)])
    assert torch.equal(logits[0], expected)
    assert torch.equal(logits[1], alone)
    for warm, blocks in ((longer, LENGTH // 16), (shorter, 144 // 16)):
        computed = sequences.pool[torch.from_numpy(sequences.tables[warm][:blocks]).long()]
        before = sequences.pool[torch.from_numpy(sequences.tables[0][:blocks]).long()]
        assert torch.equal(computed, before)


def test_recycled_pages_full_of_nan_leave_no_trace(model: Llama) -> None:
    """Elsewhere a masked score of 0 times NaN left in a recycled page made NaN of the whole row."""
    sequences = Sequences(model)
    assert sequences.pool.isnan().all()
    sequences.add(TOKENS[:70])
    assert sequences.run(sequences.tiled(), [(0, 70)]).isfinite().all()
    flat = Sequences(model)
    flat.add(TOKENS[:70])
    assert flat.run(flat.flat(), [(0, 70)]).isfinite().all()


def test_blocks_that_do_not_nest_with_the_grid_are_refused(tiny_folder: Path) -> None:
    sequences = Sequences(tiny.load(tiny_folder).model, block_tokens=48)
    with pytest.raises(ConfigError, match="block_tokens"):
        TiledAttention(sequences.pool)
