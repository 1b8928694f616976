"""`kvstore record`: what it writes is a trace, and tells nobody what was asked."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer import Typer
from typer.testing import CliRunner

from bench.simulate.readers.open import open_trace
from bench.simulate.record_command import Writer, record
from kvstore.errors import ConfigError
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import small_config, started
from tests.support.raw_client import BLOCK_TOKENS, RawClient


def chain(blocks: int, seed: int) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 1 << 63, (blocks, 2), dtype=np.uint64)


def prompt(time_ms: int, hashes: NDArray[np.uint64], block_tokens: int = 16) -> pb.RecordedPrompt:
    return pb.RecordedPrompt(time_ms=time_ms, block_tokens=block_tokens, hashes=hashes.tobytes())


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    one, other = chain(5, 1), chain(3, 2)
    prompts = [
        prompt(1000, one[:3]),
        prompt(1500, other),
        prompt(4000, one),
        prompt(4001, one, 32),
        prompt(4002, one, 0),
    ]
    out = tmp_path / "live.jsonl"
    with out.open("w", encoding="utf-8") as file:
        writer = Writer(file)
        writer.take(pb.RecordReply(prompts=prompts[:2]))
        writer.take(pb.RecordReply(prompts=prompts[2:], missed=4))
    trace = open_trace(out)
    assert [trace.chain(request).tolist() for request in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 6, 7]]
    assert trace.time_ms.tolist() == [0, 500, 3000]
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.prompt_tokens.tolist() == [49, 49, 81]
    assert "3 prompts in blocks of 16 tokens" in writer.summary(out)
    assert "2 with blocks of another or an unknown size left out; 4 came too fast" in writer.summary(out)


def test_hashes_are_salted() -> None:
    """Two recordings of the same prompts have nothing in common, and neither has the store's hashes."""
    hashes = chain(4, 3)
    texts = []
    for _ in range(2):
        file = io.StringIO()
        Writer(file).take(pb.RecordReply(prompts=[prompt(1, hashes)]))
        texts.append(file.getvalue())
    assert texts[0] != texts[1]
    assert len(texts[0]) == len(texts[1])


def test_where_nothing_came_it_says_so(tmp_path: Path) -> None:
    """It said that no prompts were written in blocks of 0 tokens."""
    writer = Writer(io.StringIO())
    writer.take(pb.RecordReply())
    assert (
        writer.summary(tmp_path / "live.jsonl") == f"no prompts came: {tmp_path}/live.jsonl is no trace yet"
    )


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "there.jsonl"
    out.write_text("mine")
    app = Typer()
    app.command()(record)
    with pytest.raises(ConfigError, match="cannot be written"):
        CliRunner().invoke(app, [str(out)], catch_exceptions=False)
    assert out.read_text() == "mine"


def test_live_traffic_is_recorded_and_read() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as name, started(small_config(Path(name))) as service:
        service.call("Record", pb.RecordRequest(), service="admin")  # as the command's first call: it begins
        client = RawClient(service.socket)
        client.begin()
        for lease, tokens in enumerate((range(40), range(48), range(100, 120)), start=1):
            client.acquire(client.chain(tokens), lease=lease)
        client.stub.Detach(pb.DetachRequest(token=client.token), timeout=5.0)
        client.close()
        out = Path(name) / "live.jsonl"
        app = Typer()
        app.command()(record)
        done = CliRunner().invoke(
            app, [str(out), "--for", "0.2s", "--socket", service.socket], catch_exceptions=False
        )
        assert done.exit_code == 0
        assert done.stderr.count("prompts") == 2, "one line of progress in 30 s, and the summary"
        trace = open_trace(out)
    assert trace.block_tokens == BLOCK_TOKENS
    assert np.diff(trace.offsets).tolist() == [10, 12, 5]
    assert trace.chain(1)[:10].tolist() == trace.chain(0).tolist()
    assert set(trace.chain(2).tolist()).isdisjoint(trace.chain(1).tolist())
