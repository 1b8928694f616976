"""How an answer ended, by its tokens, and what the store is told of it: how soon its conversation goes on.

Some models have tokens of their own that begin a call of a tool. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Ending
from kvstore.client import Namespace, Session, StopReason

__all__ = ["ending_of", "say_ended", "tool_tokens", "tool_tokens_in"]

_BEGIN_A_CALL = (
    "<tool_call>",  # Qwen, Hermes, SmolLM3
    "<|python_tag|>",  # Llama 3.1
    "<|eom_id|>",  # Llama 3.1: the message ends, the turn does not
    "[TOOL_CALLS]",  # Mistral
    "<｜tool▁calls▁begin｜>",  # DeepSeek  # noqa: RUF001 (spelt with these letters)
    "<|tool_calls_section_begin|>",  # Kimi K2
)
_TOOL_PRIORITY = 50
"""In the middle of 1 to 100: an engine's own ranges have room above and below."""
_TOOL_MS = 60_000
"""Most tools have answered by then. Of all that was tried on traces of agents, keeping what waits for a tool for a
minute was the best simple rule at every size of a cache."""


def tool_tokens(token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Those that begin a call, by a model's vocabulary; none where it spells its calls in text."""
    found = (token_id(text) for text in _BEGIN_A_CALL)
    return frozenset(token for token in found if token is not None)


def tool_tokens_in(folder: Path) -> frozenset[int]:
    """The same by the `tokenizer_config.json` of a model's folder; none where that cannot be read."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = {token["content"]: int(name) for name, token in settings["added_tokens_decoder"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()
    return tool_tokens(added.get)


def ending_of(answer: Iterable[int], tools: frozenset[int]) -> Ending:
    """Of an answer that ended by itself; its last token is among `answer`. O(answer)."""
    return Ending.TOOL_USE if not tools.isdisjoint(answer) else Ending.END_TURN


def say_ended(session: Session, namespace: Namespace, hashes: NDArray[np.uint64], ending: Ending) -> None:
    """`hashes` [n, 2]: the chain of prompt and answer. Never waits; holds nothing."""
    session.step()  # what was sealed last is among them
    if ending is Ending.TOOL_USE:
        session.retain(namespace, hashes, stop=StopReason.TOOL_USE, priority=_TOOL_PRIORITY, ttl_ms=_TOOL_MS)
    else:  # which also ends what an earlier turn's tool had retained
        session.retain(namespace, hashes, stop=StopReason.END_TURN)
