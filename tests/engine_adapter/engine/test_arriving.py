"""Steps over cached KV that is still being loaded: each layer waits for its own, and what does not come fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.base import Admission, RequestId
from engine_adapter.engine.engine import Completion, Engine
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.request import FinishReason
from engine_adapter.engine.runner import Runner
from engine_adapter.engine.runners import make_runner
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.loading.arrival import Arrival
from kvstore.errors import Unavailable
from tests.engine_adapter.engine import tiny
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import random_tokens
from tests.engine_adapter.engine.test_cuda_runner import twin
from tests.engine_adapter.engine.test_engine import tokens_of

BLOCK = 16
LAYERS = 4
EIGHT = SamplingParams(max_new_tokens=8, ignore_eos=True)
PREFIX = random_tokens(6 * BLOCK, seed=1)
PROMPTS = [PREFIX + random_tokens(n, seed=n) for n in (40, 2, 90)]
NEVER_S = 0.05
Make = Callable[[LoadedModel, Tensor, EngineSettings], Runner]
MODES: dict[str, tuple[Make, EngineSettings]] = {
    "flat": (make_runner, EngineSettings(chunk_tokens=32)),
    "deterministic": (make_runner, EngineSettings(deterministic=True)),
    "cuda": (twin, EngineSettings(chunk_tokens=32)),
    "overlapped": (twin, EngineSettings(chunk_tokens=32, overlap=1)),
}


class LoadingBlocks(PrefixCacheBlocks):
    """What a request hits alone is taken out of its pages when it is admitted, and comes back group by group.

    Until then the pages hold NaN: whoever reads a layer too soon answers nonsense. A group that is `withheld` never
    comes.
    """

    def __init__(self, loaded: LoadedModel, *, groups: int = LAYERS, withheld: int | None = None) -> None:
        super().__init__(num_pages=128, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK)
        payload = loaded.config.kv_token_bytes(4) * BLOCK
        self.payload = self.memory[:, :payload]
        self.layers = loaded.config.num_layers
        self.groups, self.withheld = groups, withheld
        self.rejects = 0
        """So many loads more turn out, at their end, not to be what was stored."""
        self.delay_s = 0.002
        self.early: list[RequestId] = []
        self.threads: list[threading.Thread] = []

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        admission = super().admit(request, num_tokens)
        if admission is None or not admission.cached_tokens:
            return admission
        pages = np.array(self.tables[request].pages[: admission.cached_tokens // BLOCK])
        if (self.refs[pages] > 1).any():
            return admission  # another one reads them: they are there
        patience_s = 10.0 if self.withheld is None else NEVER_S
        arrival = Arrival(layers=self.layers, groups=self.groups, patience_s=patience_s)
        saved = self.payload[pages]
        self.payload[pages] = 0xFF
        thread = threading.Thread(target=self._bring, args=(pages, saved, arrival))
        self.threads.append(thread)
        self.early.append(request)
        thread.start()
        return Admission(
            cached_tokens=admission.cached_tokens,
            cached_by_tier={"dram": admission.cached_tokens},
            arriving=arrival,
        )

    def _bring(self, pages: NDArray[np.int64], saved: NDArray[np.uint8], arrival: Arrival) -> None:
        size = self.payload.shape[1] // self.groups
        for group in range(self.groups):
            if group == self.withheld:
                return
            time.sleep(self.delay_s)
            part = slice(group * size, (group + 1) * size)
            self.payload[pages, part] = saved[:, part]
            if group == self.groups - 1 and self.rejects:
                self.rejects -= 1
                arrival.reject()
            else:
                arrival.came(group)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.save_folder(tmp_path_factory.mktemp("four"), {"num_hidden_layers": LAYERS})
    return tiny.load(folder)


def answers(engine: Engine) -> list[Completion]:
    """One after the other, so that each finds its prefix as the one before left it."""
    return [engine.generate([prompt], EIGHT)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [2, 4])
def test_answers_are_those_over_whole_loads(loaded: LoadedModel, mode: str, groups: int) -> None:
    make, settings = MODES[mode]
    whole = PrefixCacheBlocks(
        num_pages=128, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK
    )
    expected = answers(Engine(loaded, whole, settings, make_runner=make))
    blocks = LoadingBlocks(loaded, groups=groups)
    engine = Engine(loaded, blocks, settings, make_runner=make)
    found = answers(engine)
    assert tokens_of(found) == tokens_of(expected)
    assert len(blocks.early) == 2
    assert [answer.stats.cached_tokens for answer in found] == [0, 6 * BLOCK, 6 * BLOCK]
    assert tokens_of(answers(engine)) == tokens_of(expected)
    blocks.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_requests_with_and_without_a_load_under_way_share_steps(loaded: LoadedModel, mode: str) -> None:
    """One decodes, one has its prefix under way, one computes everything."""
    make, settings = MODES[mode]
    others = [random_tokens(30, seed=70), random_tokens(75, seed=71)]
    blocks = LoadingBlocks(loaded)
    engine = Engine(loaded, blocks, settings, make_runner=make)
    expected = [
        engine.generate([prompt], EIGHT)[0].token_ids for prompt in (others[0], PROMPTS[0], others[1])
    ]
    engine.add_request(others[0], EIGHT, RequestId("0"))
    outputs = engine.step()
    engine.add_request(PROMPTS[0], EIGHT, RequestId("1"))
    engine.add_request(others[1], EIGHT, RequestId("2"))
    found: dict[str, tuple[int, ...]] = {}
    for output in (*outputs, *engine.run()):
        found[output.request_id] = (*found.get(output.request_id, ()), *output.token_ids)
    assert RequestId("1") in blocks.early
    assert [found[str(i)] for i in range(3)] == expected
    blocks.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_and_is_not_what_was_stored_is_asked_for_again(loaded: LoadedModel, mode: str) -> None:
    """Its step had begun with the layers before: nothing of that counts, and its answer is the same."""
    make, settings = MODES[mode]
    expected = answers(Engine(loaded, LoadingBlocks(loaded), settings, make_runner=make))
    blocks = LoadingBlocks(loaded)
    engine = Engine(loaded, blocks, settings, make_runner=make)
    engine.generate([PROMPTS[0]], EIGHT)
    blocks.rejects = 1
    loads = len(blocks.early)
    answer = engine.generate([PROMPTS[1]], EIGHT)[0]
    assert len(blocks.early) == loads + 2
    assert blocks.rejects == 0
    assert answer.token_ids == expected[1].token_ids
    blocks.check_integrity()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("withheld", [0, LAYERS - 1])
def test_what_never_comes_fails_its_request_alone(loaded: LoadedModel, mode: str, withheld: int) -> None:
    """Nothing of the step is committed; the others compute the same again."""
    make, settings = MODES[mode]
    other = random_tokens(90, seed=72)
    blocks = LoadingBlocks(loaded)
    engine = Engine(loaded, blocks, settings, make_runner=make)
    engine.generate([PROMPTS[0]], EIGHT)
    expected = Engine(
        loaded,
        PrefixCacheBlocks(num_pages=128, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK),
        settings,
        make_runner=make,
    ).generate([other], EIGHT)[0]
    blocks.withheld = withheld
    sealed = set(blocks.sealed)
    engine.add_request(PREFIX + random_tokens(50, seed=73), EIGHT, RequestId("late"))
    engine.add_request(other, EIGHT, RequestId("other"))
    outputs = list(engine.run())
    (late,) = [output for output in outputs if output.request_id == "late"]
    assert late.finish is FinishReason.FAILED
    assert isinstance(late.error, Unavailable)
    assert "96 tokens was not loaded" in str(late.error)
    assert "\n" not in str(late.error)
    tokens = [token for output in outputs if output.request_id == "other" for token in output.token_ids]
    assert tuple(tokens) == expected.token_ids
    assert set(blocks.sealed) - sealed == {
        tuple((other + tokens)[: end * BLOCK]) for end in range(1, (len(other) + 7) // BLOCK + 1)
    }
    assert not blocks.tables
    assert blocks.under_way[-1] == 0
    blocks.check_integrity()


def test_a_step_that_waited_for_a_load_says_nothing_of_the_speed_of_prefill(loaded: LoadedModel) -> None:
    blocks = LoadingBlocks(loaded)
    told: list[float] = []
    blocks.computed = lambda spans, seconds: told.append(seconds)  # type: ignore[method-assign]
    blocks.delay_s = 0.05
    engine = Engine(loaded, blocks, EngineSettings(chunk_tokens=512))
    engine.generate([PROMPTS[0]], EIGHT)
    assert len(told) == 1
    engine.generate([PROMPTS[2]], EIGHT)
    assert len(told) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_preempted_request_goes_on_where_what_comes_is_not_what_was_stored(
    loaded: LoadedModel, mode: str
) -> None:
    """It failed, as one does that was answered from a wrong block; but what comes was used for nothing yet."""
    make, settings = MODES[mode]
    expected = answers(Engine(loaded, LoadingBlocks(loaded), settings, make_runner=make))
    blocks = LoadingBlocks(loaded)
    engine = Engine(loaded, blocks, settings, make_runner=make)
    engine.generate([PROMPTS[0]], EIGHT)
    request = engine.add_request(PROMPTS[1], EIGHT)
    found: list[int] = []
    while len(found) < 3:
        found += [token for output in engine.step() for token in output.token_ids]
    blocks.rejects = 1
    engine._settle()
    engine._scheduler.restart(engine._live[request].request)
    outputs = list(engine.run())
    assert blocks.rejects == 0
    assert [output.error for output in outputs if output.error is not None] == []
    found += [token for output in outputs for token in output.token_ids]
    assert tuple(found) == expected[1].token_ids
    blocks.check_integrity()
