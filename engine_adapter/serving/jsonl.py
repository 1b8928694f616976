"""What a worker and its clients say to each other: one JSON object a line over a unix socket.

A client sends requests; the worker answers each with events that carry the request's `id`:

    → {"id": "a", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": true}
    ← {"id": "a", "event": "token", "text": "Hi", "token_ids": [19556]}          only when `stream`; may repeat
    ← {"id": "a", "event": "done", "text": "Hi there", "prompt_tokens": 31, …}   the fields of `Result`
    ← {"id": "a", "event": "error", "code": "INVALID_ARGUMENT", "message": "…"}  instead of `done`
    → {"id": "a", "cancel": true}                                                 answered by `done`, "aborted"

Exactly one of `prompt` (text as it is), `messages` (put into the model's chat template) and `token_ids` is the input.
`max_tokens` 128, `temperature` 0 (greedy), `top_k` 0 and `top_p` 1 (off), `seed` 0, `ignore_eos` and `stream` false
may be left out. Ids are strings, unique among a connection's live requests. Imports no torch: clients use it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from kvstore.errors import InvalidArgument, KvstoreError, from_grpc_code

__all__ = [
    "MAX_LINE_BYTES",
    "Cancel",
    "GenerateRequest",
    "Message",
    "Result",
    "decode_event",
    "decode_line",
    "encode",
    "encode_done",
    "encode_error",
    "encode_request",
    "encode_tokens",
    "peek_id",
]

MAX_LINE_BYTES = 16 << 20
_MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt in one of its three forms, and how to continue it."""

    id: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        given = [self.prompt is not None, self.messages is not None, self.token_ids is not None]
        if sum(given) != 1:
            raise InvalidArgument("give exactly one of prompt, messages and token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Ends a live request early."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a request.

    `ttft_s` runs from the request's acceptance to its first token, `tokens_per_s` counts the tokens after the first
    (0 where there is none).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    ttft_s: float | None
    tokens_per_s: float


def decode_line(line: bytes) -> GenerateRequest | Cancel:
    """One line of a client. Raises InvalidArgument that names the field that is wrong."""
    raw = _object(line)
    name = raw.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID_CHARACTERS:
        raise InvalidArgument(f"id must be a string of 1 to {_MAX_ID_CHARACTERS} characters")
    if raw.get("cancel") is True:
        return Cancel(id=name)
    unknown = raw.keys() - {field.name for field in fields(GenerateRequest)}
    if unknown:
        raise InvalidArgument(f"unknown field {min(unknown)!r}")
    return GenerateRequest(
        id=name,
        prompt=_text(raw, "prompt"),
        messages=_messages(raw.get("messages")),
        token_ids=_token_ids(raw.get("token_ids")),
        max_tokens=_integer(raw, "max_tokens", 128),
        temperature=_number(raw, "temperature", 0.0),
        top_k=_integer(raw, "top_k", 0),
        top_p=_number(raw, "top_p", 1.0),
        seed=_integer(raw, "seed", 0),
        ignore_eos=_flag(raw, "ignore_eos"),
        stream=_flag(raw, "stream"),
    )


def peek_id(line: bytes) -> str:
    """The id of a line that could not be decoded, for its error event; empty where even that is missing."""
    try:
        name = _object(line).get("id")
    except InvalidArgument:
        return ""
    return name if isinstance(name, str) else ""


def encode_request(request: GenerateRequest) -> bytes:
    """A request as its line; fields that are not given are left out."""
    return encode({key: value for key, value in asdict(request).items() if value is not None})


def encode_tokens(name: str, text: str, token_ids: Sequence[int]) -> bytes:
    """A piece of the answer."""
    return encode({"id": name, "event": "token", "text": text, "token_ids": list(token_ids)})


def encode_done(name: str, result: Result) -> bytes:
    """The end of an answer."""
    return encode({"id": name, "event": "done", **asdict(result)})


def encode_error(name: str, error: KvstoreError) -> bytes:
    """The end of a request that failed."""
    return encode({"id": name, "event": "error", "code": error.grpc_code, "message": str(error)})


def encode(value: Mapping[str, object]) -> bytes:
    """`value` as one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def decode_event(line: bytes) -> str | Result:
    """One event of a worker: a piece of text, or the result. An error event is raised as what it stands for."""
    raw = _object(line)
    match raw.get("event"):
        case "token":
            return _text(raw, "text") or ""
        case "done":
            return _result(raw)
        case "error":
            raise from_grpc_code(
                _text(raw, "code") or "INTERNAL", _text(raw, "message") or "the worker failed"
            )
        case other:
            raise InvalidArgument(f"unknown event {other!r}")


def _result(raw: Mapping[str, object]) -> Result:
    tiers = raw.get("cached_by_tier")
    if not isinstance(tiers, dict) or not all(isinstance(count, int) for count in tiers.values()):
        raise InvalidArgument("cached_by_tier must be an object of integers")
    return Result(
        text=_text(raw, "text") or "",
        token_ids=_token_ids(raw.get("token_ids")) or (),
        finish_reason=_text(raw, "finish_reason") or "",
        prompt_tokens=_integer(raw, "prompt_tokens", 0),
        cached_tokens=_integer(raw, "cached_tokens", 0),
        cached_by_tier=tiers,
        ttft_s=None if raw.get("ttft_s") is None else _number(raw, "ttft_s", 0.0),
        tokens_per_s=_number(raw, "tokens_per_s", 0.0),
    )


def _object(line: bytes) -> dict[str, object]:
    try:
        text = line.decode()  # json itself lets halves of surrogate pairs pass, which no answer can repeat
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a line of JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument("a line must be a JSON object")
    return value


def _text(raw: Mapping[str, object], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{key} must be a string")
    return value


def _integer(raw: Mapping[str, object], key: str, default: int) -> int:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{key} must be an integer")
    return value


def _number(raw: Mapping[str, object], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{key} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{key} is too large") from None


def _flag(raw: Mapping[str, object], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{key} must be true or false")
    return value


def _messages(value: object) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise InvalidArgument("messages must be a list of objects with role and content")
    messages = []
    for item in value:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidArgument("messages must be a list of objects with role and content")
        messages.append(Message(role=role, content=content))
    return tuple(messages)


def _token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidArgument("token_ids must be a list of integers")
    return tuple(value)
