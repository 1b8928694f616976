"""Every format is read as its source describes it, and what is no trace is said with its line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bench.simulate.readers.base import Chains
from bench.simulate.readers.open import open_trace
from bench.simulate.readers.recorded import header, row_of
from bench.simulate.trace import Pacing, Turn
from eviction.base import Stop
from kvstore.errors import InvalidArgument
from tests.bench.simulate.traces import DATA, random_chains, trace_of, whole


def test_mooncake() -> None:
    trace = open_trace(DATA / "mooncake.jsonl")
    assert (trace.block_tokens, trace.pacing) == (512, Pacing.TRACE)
    assert np.array_equal(np.diff(trace.offsets), -(-trace.prompt_tokens // 512))
    rows = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    same_ids = rows[0]["hash_ids"][0] == rows[1]["hash_ids"][0]
    assert same_ids == (trace.chain(0)[0] == trace.chain(1)[0])
    assert trace.unique_blocks == len({block for row in rows for block in row["hash_ids"]})


def test_a_prompt_that_contains_the_last_one_goes_on_with_its_session() -> None:
    trace = open_trace(DATA / "mooncake.jsonl")
    # 2,651 tokens, then 3,024 that begin with the same five full blocks, then 3,142 with four of them and two new.
    turns = [int(np.flatnonzero(trace.prompt_tokens == tokens)[0]) for tokens in (2651, 3024)]
    assert trace.session[turns[0]] == trace.session[turns[1]]
    assert trace.turn[turns[1]] == trace.turn[turns[0]] + 1
    # Only the first block, which all share, makes no session.
    assert len(set(trace.session[:3].tolist())) == 3


def test_claude_code_sessions_are_unpacked_in_the_order_of_their_times() -> None:
    trace = open_trace(DATA / "claude_code.jsonl", 64)
    assert trace.pacing is Pacing.SESSION
    assert np.array_equal(np.diff(trace.offsets), trace.prompt_tokens // 64)  # full blocks alone have ids
    for session in range(4):
        mine = np.flatnonzero(trace.session == session)
        assert (np.diff(trace.time_ms[mine]) >= 0).all()
        assert trace.turn[mine].tolist() == list(range(len(mine)))
    assert Stop.TOOL_USE in trace.stop
    chains = [set(trace.chain(request).tolist()) for request in range(len(trace))]
    other = trace.session != trace.session[0]
    own = set().union(*(chain for chain, apart in zip(chains, other, strict=True) if not apart))
    assert own.isdisjoint(set().union(*(chain for chain, apart in zip(chains, other, strict=True) if apart)))


def test_requests_of_sub_agents_are_in_their_session() -> None:
    rows = [json.loads(line) for line in (DATA / "claude_code.jsonl").read_text().splitlines()]
    nested = sum(
        len(entry["requests"]) if entry["type"] == "subagent" else 1
        for row in rows
        for entry in row["requests"]
    )
    assert len(open_trace(DATA / "claude_code.jsonl")) == nested


def test_claude_code_is_coarsened_to_512_tokens() -> None:
    fine, coarse = open_trace(DATA / "claude_code.jsonl", 64), open_trace(DATA / "claude_code.jsonl")
    assert coarse.block_tokens == 512
    assert np.array_equal(np.diff(coarse.offsets), np.diff(fine.offsets) // 8)
    for one, other in ((0, 1), (2, 5), (0, len(fine) - 1)):
        shared = min(map(len, (fine.chain(one), fine.chain(other))))
        equal = fine.chain(one)[:shared] == fine.chain(other)[:shared]
        run = shared if equal.all() else int(equal.argmin())
        coarse_shared = min(map(len, (coarse.chain(one), coarse.chain(other))))
        coarse_equal = coarse.chain(one)[:coarse_shared] == coarse.chain(other)[:coarse_shared]
        coarse_run = coarse_shared if coarse_equal.all() else int(coarse_equal.argmin())
        assert coarse_run == run // 8


def test_bailian_ids_name_contents_so_that_chains_are_made_of_them() -> None:
    trace = open_trace(DATA / "bailian.jsonl")
    chains = [trace.chain(request).tolist() for request in range(4)]
    assert chains == [
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 6, 7, 8],
        [0, 1, 6, 7, 8, 9],
    ]  # 2 behind 9 is another block
    assert trace.block_tokens == 16
    assert trace.session.tolist() == [0, 1, 0, 0]
    assert trace.turn.tolist() == [0, 0, 1, 2]
    assert trace.time_ms.tolist() == [500, 1250, 7061, 9000]


def test_text_shares_blocks_as_far_as_it_is_equal() -> None:
    trace = open_trace(DATA / "text.jsonl", 32)
    prompts = [json.loads(line) for line in (DATA / "text.jsonl").read_text().splitlines()]
    prompts.sort(key=lambda row: row["timestamp"])
    first, second = (row["input"].encode() for row in prompts[:2])
    common = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    one, other = trace.chain(0), trace.chain(1)
    equal = one[: len(other)] == other[: len(one)]
    assert int(np.count_nonzero(equal)) == common // 128 > 0


def test_lengths_alone_share_nothing() -> None:
    trace = open_trace(DATA / "lengths.jsonl")
    assert len(trace) == 12
    assert trace.unique_blocks == len(trace.blocks) == int((trace.prompt_tokens // 512).sum())


def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    turns = [
        Turn(time_ms=0, ids=[-5, 7], prompt_tokens=70, output_tokens=3, session=1, stop=Stop.END_TURN),
        Turn(time_ms=9, ids=[-5, 7, 2**62], prompt_tokens=99, output_tokens=0, session=1),
    ]
    rows = [header(block_tokens=32), *(row_of(turn) for turn in turns)]
    path = tmp_path / "live.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trace = open_trace(path)
    assert [trace.chain(0).tolist(), trace.chain(1).tolist()] == [[0, 1], [0, 1, 2]]
    assert trace.block_tokens == 32
    assert trace.stop.tolist() == [Stop.END_TURN, Stop.UNKNOWN]
    assert trace.turn.tolist() == [0, 1]


def test_packed_files_are_read(tmp_path: Path) -> None:
    plain = DATA / "mooncake.jsonl"
    packed = tmp_path / "mooncake.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    assert np.array_equal(open_trace(packed).blocks, open_trace(plain).blocks)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no requests"),
        ("not json\n", ":1: is no JSON"),
        ("[1]\n", ":1: a row is a JSON object, not list"),
        ('{"a": 1}\n', "is of no format that is known"),
        ('{"timestamp": 1, "hash_ids": [1], "input_length": 5}\n', ":1: is no row of a mooncake trace: lacks 'output"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1}\n\n{"timestamp": 2, "input_length": "x"}\n',
            ":3: is no row of a lengths trace: input_length is 'x', not a whole number from 0 to 2,147,483,647",
        ),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_said_in_a_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as error:
        open_trace(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_packed_files_are_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"no zstd at all")
    with pytest.raises(InvalidArgument, match="no zstd"):
        open_trace(path)
    with pytest.raises(InvalidArgument, match="is not a file"):
        open_trace(tmp_path / "absent.jsonl")


def test_blocks_are_no_multiple() -> None:
    with pytest.raises(InvalidArgument, match="no multiple of 512"):
        open_trace(DATA / "mooncake.jsonl", 768)


def test_halves_share_no_session_and_are_all() -> None:
    trace = open_trace(DATA / "mooncake.jsonl")
    halves = [trace.part(index, 2) for index in range(2)]
    assert not set(halves[0].session.tolist()) & set(halves[1].session.tolist())
    assert sum(map(len, halves)) == len(trace)
    assert all(half.unique_blocks == len(np.unique(half.blocks)) for half in halves)


def test_ids_are_numbered_by_first_appearance_whatever_they_are() -> None:
    chains = random_chains(50, seed=3)
    dense = trace_of(chains)
    huge = trace_of([[(1 << 60) + 7 * block for block in chain] for chain in chains])
    assert np.array_equal(dense.blocks, huge.blocks)
    firsts = np.unique(dense.blocks, return_index=True)[1]
    assert (np.diff(firsts) > 0).all()


def test_contents_behind_different_prefixes_are_different() -> None:
    chains = Chains()
    assert chains.ids([1, 1]) == [0, 1]
    assert chains.ids([1, 1, 1]) == [0, 1, 2]
    assert chains.ids([2, 1]) == [3, 4]


@pytest.mark.parametrize(
    "name, requests, unique, hits",
    [("mooncake_conversation", 7218, 117274, 0.3485), ("mooncake_synthetic", 2395, 37519, 0.3816)],
)
def test_whole_traces(name: str, requests: int, unique: int, hits: float) -> None:
    trace = open_trace(whole(name))
    assert (len(trace), trace.unique_blocks) == (requests, unique)
    assert 1 - unique / len(trace.blocks) == pytest.approx(hits, abs=5e-5)
