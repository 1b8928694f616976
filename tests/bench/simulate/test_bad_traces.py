"""Files that are nearly traces: each is read, or refused in a line that says where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from bench.simulate.advise_command import advise
from bench.simulate.command import simulate
from bench.simulate.readers.open import open_trace
from bench.simulate.readers.recorded import header, row_of
from bench.simulate.replay import replay
from bench.simulate.trace import Trace, Turn
from eviction.lru import LruPolicy
from kvstore.errors import InvalidArgument
from tests.bench.simulate.traces import DATA

FORMATS = ("bailian", "claude_code", "lengths", "mooncake", "recorded", "text")
ROWS = 6
WRONG = (None, True, -1, 0, 2**31, 2**63, -(10**19), 10**30, 1e300, float("inf"), float("nan"), 0.5)
OTHERS = ("", "x", [], [None], [[1]], {}, {"a": 1})
VALUES = st.one_of(st.sampled_from([*WRONG, *OTHERS]), st.integers(), st.text(max_size=3))


def rows_of(form: str) -> list[object]:
    if form == "recorded":
        turns = [Turn(time_ms=9 * at, ids=list(range(at)), prompt_tokens=16 * at + 1) for at in range(ROWS)]
        return [header(block_tokens=16), *map(row_of, turns)]
    return [json.loads(line) for line in (DATA / f"{form}.jsonl").read_text().splitlines()[:ROWS]]


def changed(data: st.DataObject, value: object) -> object:
    """The same with one thing in it missing or another."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 9)):
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = data.draw(st.sampled_from(places))
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        items[place] = changed(data, items[place])
        if data.draw(st.integers(0, 7)) == 0:
            del items[place]
        return items if isinstance(value, dict) else list(items.values())
    return data.draw(VALUES)


def opened(path: Path) -> tuple[Trace | None, str]:
    """The trace, or why it is none."""
    try:
        return open_trace(path), ""
    except InvalidArgument as error:
        return None, error.message


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
def test_a_file_with_one_wrong_thing_is_refused_in_a_line_or_read(
    form: str, tmp_path: Path, data: st.DataObject
) -> None:
    """Numbers that no array holds, fields of another kind and lengths without blocks ended in tracebacks."""
    rows = rows_of(form)
    at = data.draw(st.integers(0, len(rows) - 1))
    rows[at] = changed(data, rows[at])
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trace, error = opened(path)
    if trace is None:
        assert "\n" not in error
        assert error.startswith((f"{path}:", "trace: holds no requests"))
        return
    assert (trace.prompt_tokens >= 0).all()
    assert (trace.output_tokens >= 0).all()
    assert trace.offsets[-1] == len(trace.blocks)
    capacity = max(trace.unique_blocks // 2, 1)
    policy = LruPolicy(rows=max(trace.unique_blocks, 1), capacity_blocks=capacity)
    assert 0 <= replay(trace, policy, capacity) <= 1


REQUEST = '{"timestamp": 1, "input_length": %s, "output_length": 1}\n'
RECORDED = '{"time_ms": 0, "prompt_tokens": 1, "output_tokens": 0, "stop": %s, "blocks": ""}\n'
TURN = '{"type": "n", "t": 0, "in": 64, "out": 1, "stop": "", "keep": 0, "add": [%s]}'
SESSION = '{"hash_id_scope": 1, "block_size": 64, "requests": [' + TURN + "]}\n"


@pytest.mark.parametrize(
    "content, said",
    [
        (REQUEST % "-5", ":1: is no row of a lengths trace: input_length is -5, not a whole number from 0 to 2,147"),
        (REQUEST % "Infinity", "input_length is inf, not"),
        (REQUEST % "9223372036854775808", "input_length is 9223372036854775808, not"),
        (REQUEST % "1e400", "input_length is inf, not"),
        (REQUEST % "5" + REQUEST % "null", ":2: is no row of a lengths trace: input_length is None, not"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}\n', "timestamp is nan, not a number"),
        (
            '{"timestamp": 1, "hash_ids": [1], "input_length": 5000, "output_length": 1}\n',
            ":1: is no row of a mooncake trace: input_length is 5,000, and hash_ids has 1 blocks of 512",
        ),
        (
            '{"input": "a", "session_id": 1, "timestamp": 1}\n{"input": null, "session_id": 1, "timestamp": 2}\n',
            ":2: is no row of a text trace: input is None, not text",
        ),
        (
            '{"kvstore_trace": 1, "block_tokens": 16}\n' + RECORDED % "null",
            ":2: is no row of a recorded trace: stop is None, not text",
        ),
        ('{"kvstore_trace": 1, "block_tokens": 0}\n', ":1: is no row of a recorded trace: block_tokens is 0, not"),
        (
            SESSION % "[0, 9000000000]",
            ":1: is no row of a claude-code trace: add is 9000000000, not",
        ),
        ("[" * 100_000, ":1: is no JSON"),
        (REQUEST % "5" + "\udcff\n", ":2: is no JSON: 'utf-8' codec"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgument) as error:
        open_trace(path)
    assert error.value.message.startswith(str(path))
    assert said in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize("command", [simulate, advise])
@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_file_that_cannot_be_read_is_a_wrong_argument(command: object, name: str, tmp_path: Path) -> None:
    app = Typer()
    app.command()(command)  # type: ignore[type-var]
    with pytest.raises(InvalidArgument, match="is not a file") as error:
        CliRunner().invoke(app, [str(tmp_path / name)], catch_exceptions=False)
    assert error.value.exit_code == 2


def test_ids_may_be_any_of_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1.5, "hash_ids": [-(2**63) + 1, 2**63 - 1], "input_length": 700.0, "output_length": 1}
    path.write_text(json.dumps(row))
    trace = open_trace(path)
    assert np.array_equal(trace.blocks, [0, 1])
    assert trace.prompt_tokens.tolist() == [700]
