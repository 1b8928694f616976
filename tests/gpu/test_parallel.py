"""Tensor parallelism over two GPUs, against one."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from engine_adapter.engine import runners  # noqa: E402
from engine_adapter.engine.engine import Engine  # noqa: E402
from engine_adapter.engine.loader import load_model  # noqa: E402
from engine_adapter.engine.parallel.opening import open_parallel  # noqa: E402
from engine_adapter.engine.plain import PlainBlockManager  # noqa: E402
from engine_adapter.engine.source import find_shape  # noqa: E402
from tests.engine_adapter.engine.harness import Sequences, random_tokens  # noqa: E402
from tests.gpu.test_engine import (  # noqa: E402
    BLOCK,
    CLOSE,
    DEVICE,
    FORTY,
    SETTINGS,
    OnDevice,
    assert_equal_but_for_ties,
    error,
    on_device,
)

pytestmark = pytest.mark.gpu

PAGES = 512


def test_logits_and_answers_of_two_gpus_are_those_of_one() -> None:
    source = find_shape("llama-3.2-1b")
    whole = load_model(source, SETTINGS)
    prompts = [random_tokens(n, seed=n, vocab=source.config.vocab_size) for n in (400, 33, 7)]
    ends = [(index, len(prompt)) for index, prompt in enumerate(prompts)]
    one = on_device(whole, runners.make_runner)
    for prompt in prompts:
        one.sequences.add(prompt)
    expected = [one.run([(index, end - 1) for index, end in ends]), one.run(ends)][1]
    blocks = PlainBlockManager(
        num_pages=PAGES, page_bytes=source.config.page_bytes(BLOCK, 2), block_tokens=BLOCK, device=DEVICE
    )
    cold = Engine(whole, blocks, SETTINGS).generate(prompts, FORTY)
    with open_parallel(source, SETTINGS, size=2, num_pages=PAGES, block_tokens=BLOCK) as parallel:
        shard = parallel.loaded
        sequences = Sequences(shard.model, block_tokens=BLOCK, num_pages=PAGES)
        sequences.pool = sequences.pool.to(DEVICE)
        two = OnDevice(sequences, parallel.make_runner(shard, sequences.pool, SETTINGS))
        for prompt in prompts:
            sequences.add(prompt)
        two.run([(index, end - 1) for index, end in ends])
        assert error(two.run(ends), expected) < 2 * CLOSE
        half = PlainBlockManager(
            num_pages=PAGES, page_bytes=shard.config.page_bytes(BLOCK, 2), block_tokens=BLOCK, device=DEVICE
        )
        engine = Engine(shard, half, SETTINGS, make_runner=parallel.make_runner)
        engine.prepare()
        answers = engine.generate(prompts, FORTY)
    for prompt, first, second in zip(prompts, cold, answers, strict=True):
        assert_equal_but_for_ties(whole, prompt, first.token_ids, second.token_ids)
