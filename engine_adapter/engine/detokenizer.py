"""Streams text out of tokens; never half a character, and the pieces add up to the whole text.

A character may span up to four tokens, and some decoders treat a text's first token differently. So new tokens are
decoded behind the few tokens emitted before them, and a U+FFFD at the very end is held back: bytes may complete it.
"""

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 64  # tokens; only a run of invalid bytes gets there, and then it is emitted as it is


class Detokenizer:
    """The stream of one request. Each token costs decoding a window of a few tokens, whatever the text's length."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text was emitted in full
        self._emitted = 0  # characters of the window's text that were emitted

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that became certain, maybe empty."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            certain = len(text) - text.endswith(_REPLACEMENT)
            if len(self._window) - self._context >= _MAX_WINDOW:
                certain = len(text)
            if certain > self._emitted:
                pieces.append(text[self._emitted : certain])
                self._emitted = certain
            if certain == len(text):
                self._advance()
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, an incomplete character included (as U+FFFD). The stream is over."""
        text = self._decode(self._window)[self._emitted :]
        self._emitted += len(text)
        return text

    def _advance(self) -> None:
        """Everything is emitted: keep the newest tokens as context only."""
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))
