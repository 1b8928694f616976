"""Structured logs: one line an event on standard error, `time level event key=value …`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping

__all__ = ["Log", "Rarely", "configure"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_FIELDS = "fields"


class Log:
    """A part's logger. An event is a few fixed words; what varies goes into fields, so that lines can be counted."""

    __slots__ = ("_logger",)

    def __init__(self, part: str) -> None:
        self._logger = logging.getLogger(f"kvstore.daemon.{part}")

    def debug(self, event: str, **fields: object) -> None:
        """Something that only the one who searches for a fault wants to see."""
        self._logger.debug(event, extra={_FIELDS: fields})

    def info(self, event: str, **fields: object) -> None:
        """Something that happens rarely and is as it should be."""
        self._logger.info(event, extra={_FIELDS: fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something a person may want to act on."""
        self._logger.warning(event, extra={_FIELDS: fields})

    def error(self, event: str, **fields: object) -> None:
        """Something that a person must act on."""
        self._logger.error(event, extra={_FIELDS: fields})

    def fault(self, event: str, **fields: object) -> None:
        """A fault of ours, with its traceback; from an `except` block."""
        self._logger.error(event, extra={_FIELDS: fields}, exc_info=True)  # noqa: LOG014 (the caller is in one)


class Rarely:
    """Warnings that a peer can cause at will: a few in each interval, then how many were passed over."""

    __slots__ = ("_clock", "_interval_s", "_lines", "_log", "_passed_over", "_said", "_until_s")

    def __init__(
        self,
        log: Log,
        *,
        lines: int = 5,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._lines = lines
        self._interval_s = interval_s
        self._clock = clock
        self._until_s = 0.0
        self._said = self._passed_over = 0

    def warning(self, event: str, **fields: object) -> None:
        """As `Log.warning`, or only counted."""
        now_s = self._clock()
        if now_s >= self._until_s:
            if self._passed_over:
                fields = {**fields, "passed_over": self._passed_over}
            self._until_s, self._said, self._passed_over = now_s + self._interval_s, 0, 0
        if self._said < self._lines:
            self._said += 1
            self._log.warning(event, **fields)
        else:
            self._passed_over += 1


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        parts = [
            f"{stamp}.{int(record.msecs):03d}Z",
            record.levelname.lower(),
            record.name,
            record.getMessage(),
        ]
        parts += [f"{key}={_quoted(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line} traceback={_quoted(self.formatException(record.exc_info))}"
        return line


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(character in text for character in ' "='):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def configure(level: str) -> None:
    """Sends the daemon's logs to standard error. Called once, by the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger("kvstore")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(_LEVELS[level])
