"""What the block manager is told when an answer has ended, by the tokens that it ended with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from engine_adapter.base import Ending
from engine_adapter.endings import ending_of, tool_tokens, tool_tokens_in
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.tokenizer import TextTokenizer
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import random_tokens


def test_tokens_that_begin_a_call_are_found_by_name() -> None:
    assert tool_tokens({"<tool_call>": 7, "<|eom_id|>": 9, "other": 3}.get) == {7, 9}
    assert tool_tokens({}.get) == frozenset()


def test_the_tokenizer_of_a_model_says_which_they_are() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    assert TextTokenizer(tokenizer, None, None).tool_tokens == {tokenizer.token_to_id("<tool_call>")}


def test_a_models_folder_says_which_they_are(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {"5": {"content": "<tool_call>"}, "6": {"content": "<other>"}}}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(settings))
    assert tool_tokens_in(tmp_path) == {5}
    for text in ("{", "[]", "{}", '{"added_tokens_decoder": {"x": {"content": "<tool_call>"}}}'):
        file.write_text(text)
        assert tool_tokens_in(tmp_path) == frozenset()
    assert tool_tokens_in(tmp_path / "nowhere") == frozenset()


@pytest.mark.parametrize("answer,ending", [([1, 7, 2], Ending.TOOL_USE), ([1, 2], Ending.END_TURN)])
def test_an_answer_with_such_a_token_waits_for_a_tool(answer: list[int], ending: Ending) -> None:
    assert ending_of(answer, frozenset({7})) is ending


def stopped_at(model: LoadedModel, eos: int, tools: frozenset[int]) -> LoadedModel:
    config = model.config
    fields = {name: getattr(config, name) for name in config.__slots__} | {"eos_token_ids": (eos,)}
    tokenizer = TextTokenizer(Tokenizer(models.BPE()), None, None)
    tokenizer.tool_tokens = tools
    return LoadedModel(
        config=type(config)(**fields), model=model.model, tokenizer=tokenizer, max_tokens=model.max_tokens
    )


@pytest.mark.parametrize("waits_for_a_tool", [True, False])
def test_the_block_manager_hears_how_an_answer_ended(tiny_model: LoadedModel, waits_for_a_tool: bool) -> None:
    prompt, params = random_tokens(40, seed=1), SamplingParams(max_new_tokens=20)
    page_bytes = tiny_model.config.page_bytes(16, tiny_model.model.dtype.itemsize)

    def blocks() -> PrefixCacheBlocks:
        return PrefixCacheBlocks(num_pages=32, page_bytes=page_bytes, block_tokens=16)

    (free,) = Engine(tiny_model, blocks(), EngineSettings()).generate(
        [prompt], SamplingParams(max_new_tokens=20, ignore_eos=True)
    )
    eos = free.token_ids[4]
    tools = frozenset({free.token_ids[0]}) if waits_for_a_tool else frozenset()
    told = blocks()
    engine = Engine(stopped_at(tiny_model, eos, tools), told, EngineSettings())
    engine.generate([prompt], params)
    assert [ending for _, ending in told.endings] == [
        Ending.TOOL_USE if waits_for_a_tool else Ending.END_TURN
    ]


def test_an_answer_that_was_cut_short_says_nothing(tiny_model: LoadedModel) -> None:
    page_bytes = tiny_model.config.page_bytes(16, tiny_model.model.dtype.itemsize)
    told = PrefixCacheBlocks(num_pages=32, page_bytes=page_bytes, block_tokens=16)
    Engine(tiny_model, told, EngineSettings()).generate(
        [random_tokens(20, seed=2)], SamplingParams(max_new_tokens=4, ignore_eos=True)
    )
    assert told.endings == []
