"""Why an answer ended, by its tokens: some models have tokens of their own that begin a call of a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine_adapter.base import Ending

__all__ = ["ending_of", "tool_tokens"]

_BEGIN_A_CALL = (
    "<tool_call>",  # Qwen, Hermes, SmolLM3
    "<|python_tag|>",  # Llama 3.1
    "<|eom_id|>",  # Llama 3.1: the message ends, the turn does not
    "[TOOL_CALLS]",  # Mistral
    "<｜tool▁calls▁begin｜>",  # DeepSeek  # noqa: RUF001 (spelt with these letters)
    "<|tool_calls_section_begin|>",  # Kimi K2
)


def tool_tokens(token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Those of a model, by its vocabulary; none where it spells its calls in text."""
    found = (token_id(text) for text in _BEGIN_A_CALL)
    return frozenset(token for token in found if token is not None)


def ending_of(answer: Iterable[int], tools: frozenset[int]) -> Ending:
    """Of an answer that ended by itself; its last token is among `answer`. O(answer)."""
    return Ending.TOOL_USE if not tools.isdisjoint(answer) else Ending.END_TURN
