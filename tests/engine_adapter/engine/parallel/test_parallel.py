"""Tensor parallelism on the CPU: two processes and gloo in place of two GPUs and NCCL."""

import os
import signal
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_adapter.base import RequestId
from engine_adapter.engine.dummy import dummy_weights
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import load_model
from engine_adapter.engine.parallel.messages import PREPARE, StepReader, StepWriter, receive, send
from engine_adapter.engine.parallel.opening import open_parallel
from engine_adapter.engine.parallel.shard import Shard, shard_weights
from engine_adapter.engine.parallel.shard_config import shard_config
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.request import UNKNOWN, Chunk, Request
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.shapes import shape_of
from engine_adapter.engine.source import find_shape
from kvstore.errors import ConfigError, Unavailable
from tests.engine_adapter.engine.harness import random_tokens
from tests.engine_adapter.engine.test_engine import tokens_of

BLOCK, PAGES = 16, 64
SETTINGS = EngineSettings(overlap=1, threads=1, chunk_tokens=60, max_running=8, max_tokens=512)
PROMPTS = [random_tokens(n, seed=n) for n in (130, 32, 5, 64, 1)]


def blocks(page_bytes: int) -> PlainBlockManager:
    return PlainBlockManager(num_pages=PAGES, page_bytes=page_bytes, block_tokens=BLOCK)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_shards_add_up_to_the_whole(name: str) -> None:
    config = shape_of(name)
    assert config is not None
    weights = dummy_weights(config, 0, torch.float32, "cpu")
    shards = [shard_weights(weights, config, Shard(rank=rank, size=2)) for rank in range(2)]
    x = torch.randn(3, config.num_heads * config.head_dim)
    whole = weights.layers[0]
    parts = [half @ shard.layers[0].out.T for half, shard in zip(x.chunk(2, dim=1), shards, strict=True)]
    torch.testing.assert_close(sum(parts), x @ whole.out.T)
    hidden = torch.randn(3, config.hidden_size)
    queries = [
        (hidden @ shard.layers[0].qkv.T)[:, : config.num_heads * config.head_dim // 2] for shard in shards
    ]
    torch.testing.assert_close(
        torch.cat(queries, dim=1), (hidden @ whole.qkv.T)[:, : config.num_heads * config.head_dim]
    )
    assert shard_config(config, 2).kv_token_bytes(4) * 2 == config.kv_token_bytes(4)


@pytest.mark.parametrize("size", [3, 4])
def test_heads_that_cannot_be_shared_are_refused(size: int) -> None:
    config = shape_of("llama-tiny")
    assert config is not None
    with pytest.raises(ConfigError, match="shared evenly"):
        shard_config(config, size)


def test_a_member_sees_the_step_that_was_sent() -> None:
    ours, theirs = socket.socketpair()
    writer, reader = StepWriter(), StepReader()
    one = Request(id=RequestId("one"), tokens=[5, 6, 7, 8, 9], num_prompt=5, num_preemptions=2)
    other = Request(id=RequestId("other"), tokens=[1, 2, UNKNOWN], num_prompt=2)
    chunks = [Chunk(request=one, start=1, end=3), Chunk(request=other, start=2, end=3)]
    tables = [np.array([4, 5], np.int32), np.array([9], np.int32)]
    seen = []
    with ours, theirs:
        for _ in range(2):
            send(ours, writer.encode(chunks, tables))
            message = receive(theirs)
            assert message is not None
            step = reader.decode(message)
            seen.append(step)
            for mine, sent in zip(step.chunks, chunks, strict=True):
                assert (mine.start, mine.end, mine.samples) == (sent.start, sent.end, sent.samples)
                assert (
                    mine.request.tokens[mine.start : mine.end] == sent.request.tokens[sent.start : sent.end]
                )
                assert mine.request.tokens[mine.start] == sent.request.tokens[sent.start]
                assert mine.request.num_preemptions == sent.request.num_preemptions
            assert [table.tolist() for table in step.tables] == [[4, 5], [9]]
        assert [c.request for c in seen[0].chunks] == [c.request for c in seen[1].chunks]
        send(ours, writer.encode(chunks[:1], tables[:1]))
        send(ours, writer.encode(chunks, tables))
        send(ours, PREPARE)
        reader.decode(receive(theirs))  # type: ignore[arg-type]
        back = reader.decode(receive(theirs))  # type: ignore[arg-type]
        assert back.chunks[0].request is seen[0].chunks[0].request
        assert back.chunks[1].request is not seen[0].chunks[1].request  # it was away for a step
        assert receive(theirs)[0] == 0  # type: ignore[index]
        ours.close()
        assert receive(theirs) is None


def test_only_new_pages_are_sent() -> None:
    """And all of them to a request that was preempted: it has others then, if as many."""
    writer, reader = StepWriter(lambda pages: pages + 100), StepReader(lambda pages: pages * 10)
    request = Request(id=RequestId("one"), tokens=list(range(9)), num_prompt=9)
    chunks = [Chunk(request=request, start=8, end=9)]
    sent = []
    for pages, preemptions in (([4, 5], 0), ([4, 5], 0), ([4, 5, 6], 0), ([7, 8, 9], 1), ([7, 8, 9, 2], 1)):
        request.num_preemptions = preemptions
        message = writer.encode(chunks, [np.array(pages, np.int32)])
        sent.append(int(message[2]))
        (table,) = reader.decode(message).tables
        assert table.tolist() == [10 * (page + 100) for page in pages]
    assert sent == [2, 0, 1, 3, 1]


def test_two_shards_answer_as_the_whole_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They met in a file of a temporary folder, which a killed worker left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = find_shape("llama-tiny")
    whole = load_model(source, SETTINGS)
    params = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=6, temperature=0.8, seed=3)]
    reference = Engine(whole, blocks(source.config.page_bytes(BLOCK, 4)), EngineSettings(max_tokens=512))
    expected = [tokens_of(reference.generate(PROMPTS, param)) for param in params]
    with open_parallel(source, SETTINGS, size=2, num_pages=PAGES, block_tokens=BLOCK) as parallel:
        page_bytes = parallel.loaded.config.page_bytes(BLOCK, 4)
        engine = Engine(parallel.loaded, blocks(page_bytes), SETTINGS, make_runner=parallel.make_runner)
        engine.prepare()
        assert not list(tmp_path.glob("kvstore*"))
        assert [tokens_of(engine.generate(PROMPTS, param)) for param in params] == expected
        os.kill(parallel.members[0]._process.pid, signal.SIGKILL)
        parallel.members[0]._process.wait()
        with pytest.raises(Unavailable, match="member"):
            engine.generate(PROMPTS, params[0])
