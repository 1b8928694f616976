"""The lines between a worker and its clients."""

from __future__ import annotations

import json

import pytest

from engine_adapter.serving.jsonl import (
    Cancel,
    GenerateRequest,
    Message,
    Result,
    decode_event,
    decode_line,
    encode_done,
    encode_error,
    encode_request,
    encode_tokens,
    peek_id,
)
from kvstore.errors import InvalidArgument, ResourceExhausted


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(id="a", prompt="Once"),
        GenerateRequest(id="b", messages=(Message(role="user", content="Grüße\n"),), stream=True, seed=7),
        GenerateRequest(id="c", token_ids=(1, 2), temperature=0.5, top_k=3, top_p=0.9, max_tokens=4),
    ],
)
def test_a_request_survives_its_line(request_: GenerateRequest) -> None:
    line = encode_request(request_)
    assert line.count(b"\n") == 1
    assert decode_line(line) == request_


@pytest.mark.parametrize(
    "raw, problem",
    [
        ({"prompt": "x"}, "id must be"),
        ({"id": 3, "prompt": "x"}, "id must be"),
        ({"id": "a"}, "exactly one of"),
        ({"id": "a", "prompt": "x", "token_ids": [1]}, "exactly one of"),
        ({"id": "a", "prompt": 3}, "prompt must be"),
        ({"id": "a", "messages": []}, "messages must be"),
        ({"id": "a", "messages": [{"role": "user"}]}, "messages must be"),
        ({"id": "a", "token_ids": [1, True]}, "token_ids must be"),
        ({"id": "a", "token_ids": ["1"]}, "token_ids must be"),
        ({"id": "a", "prompt": "x", "max_tokens": "3"}, "max_tokens must be"),
        ({"id": "a", "prompt": "x", "max_tokens": True}, "max_tokens must be"),
        ({"id": "a", "prompt": "x", "stream": 1}, "stream must be"),
        ({"id": "a", "prompt": "x", "temprature": 1}, "unknown field 'temprature'"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_wrong_line_is_named(raw: object, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        decode_line(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "line",
    [
        rb'{"id":"a","prompt":"x\ud800"}',
        rb'{"id":"\uDFFF","prompt":"x"}',
        b'{"id":"a","prompt":"x\xed\xa0\x80"}',
    ],
)
def test_half_a_surrogate_pair_is_no_text(line: bytes) -> None:
    """Such an id could not be answered: the client waited for ever, with those whose answers stood behind it."""
    with pytest.raises(InvalidArgument, match="not a line of JSON"):
        decode_line(line)
    assert peek_id(line) == ""


def test_a_whole_surrogate_pair_is_a_character() -> None:
    line = decode_line(rb'{"id":"a","prompt":"\ud83d\ude00"}')
    assert isinstance(line, GenerateRequest)
    assert line.prompt == "\U0001f600"


def test_a_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="temperature is too large"):
        decode_line(b'{"id":"a","prompt":"x","temperature":1' + b"0" * 400 + b"}")


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not a line of JSON"):
        decode_line(b"\xff{")
    with pytest.raises(InvalidArgument):
        decode_line(b"[" * 100_000)


def test_a_cancel_is_told_from_a_request() -> None:
    assert decode_line(b'{"id": "a", "cancel": true}') == Cancel(id="a")


def test_events_survive_their_lines() -> None:
    result = Result(
        text="Hé",
        token_ids=(1, 2),
        finish_reason="stop",
        prompt_tokens=70,
        cached_tokens=64,
        cached_by_tier={"hbm": 32, "dram": 32},
        ttft_s=0.25,
        tokens_per_s=4.0,
    )
    assert decode_event(encode_done("a", result)) == result
    assert decode_event(encode_tokens("a", "Hé", (1,))) == "Hé"
    with pytest.raises(ResourceExhausted, match="too many"):
        decode_event(encode_error("a", ResourceExhausted("too many")))
