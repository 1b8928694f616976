"""Tensor parallelism over two GPUs, against one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from torch import Tensor  # noqa: E402

from engine_adapter.engine import runners  # noqa: E402
from engine_adapter.engine.engine import Engine  # noqa: E402
from engine_adapter.engine.loader import LoadedModel, load_model  # noqa: E402
from engine_adapter.engine.parallel.opening import ParallelModel, open_parallel  # noqa: E402
from engine_adapter.engine.plain import PlainBlockManager  # noqa: E402
from engine_adapter.engine.source import find_shape  # noqa: E402
from tests.engine_adapter.engine.harness import random_tokens  # noqa: E402
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

MODEL = "llama-3.2-1b"
PAGES = 512
PROMPTS = [random_tokens(n, seed=n, vocab=128256) for n in (400, 33, 7)]


@pytest.fixture(scope="module")
def whole() -> LoadedModel:
    return load_model(find_shape(MODEL), SETTINGS)


@contextmanager
def two_gpus() -> Iterator[ParallelModel]:
    with open_parallel(find_shape(MODEL), SETTINGS, size=2, num_pages=PAGES, block_tokens=BLOCK) as parallel:
        yield parallel


def blocks(loaded: LoadedModel) -> PlainBlockManager:
    page_bytes = loaded.config.page_bytes(BLOCK, 2)
    return PlainBlockManager(num_pages=PAGES, page_bytes=page_bytes, block_tokens=BLOCK, device=DEVICE)


def last_logits(device: OnDevice) -> Tensor:
    """Of the last token of each prompt, decoded behind the others."""
    for prompt in PROMPTS:
        device.sequences.add(prompt)
    ends = [(index, len(prompt)) for index, prompt in enumerate(PROMPTS)]
    device.run([(index, end - 1) for index, end in ends])
    return device.run(ends)


def test_logits_of_two_gpus_are_those_of_one(whole: LoadedModel) -> None:
    expected = last_logits(on_device(whole, runners.make_runner))
    with two_gpus() as parallel:
        assert error(last_logits(on_device(parallel.loaded, parallel.make_runner)), expected) < 2 * CLOSE


def test_answers_of_two_gpus_are_those_of_one(whole: LoadedModel) -> None:
    expected = Engine(whole, blocks(whole), SETTINGS).generate(PROMPTS, FORTY)
    with two_gpus() as parallel:
        shard = parallel.loaded
        engine = Engine(shard, blocks(shard), SETTINGS, make_runner=parallel.make_runner)
        engine.prepare()
        answers = engine.generate(PROMPTS, FORTY)
    for prompt, first, second in zip(PROMPTS, expected, answers, strict=True):
        assert_equal_but_for_ties(whole, prompt, first.token_ids, second.token_ids)
