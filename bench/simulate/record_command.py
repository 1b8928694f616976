"""Write a trace of live traffic that simulate and advise read: when prompts came, and salted hashes of their blocks."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import numpy as np
import typer

from bench.output import progress
from bench.simulate.readers.recorded import header, row_of
from bench.simulate.trace import Turn
from kvstore.cli.admin import call_admin
from kvstore.errors import ConfigError, KvstoreError
from kvstore.units import format_count, parse_duration
from kvstore.wire.packed import hashes_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Writer", "record"]

_POLL_S = 0.5
_SAY_S = 30.0  # between lines of a log, which may last for days
_SALT_BYTES = 32


def record(
    out: Annotated[Path, typer.Argument(help="File to write, JSON Lines; must not be there yet.")],
    *,
    duration: Annotated[
        str | None, typer.Option("--for", help="How long, like 10m; without it until interrupted.")
    ] = None,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
) -> None:
    """Write a trace of live traffic."""
    until_s = time.monotonic() + (parse_duration(duration) if duration else float("inf"))
    try:
        file = out.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    with file, progress(every_s=_SAY_S) as say:
        writer = Writer(file)
        try:
            for reply in _replies(socket, until_s):
                writer.take(reply)
                say(f"{format_count(writer.prompts)} prompts")
        except KeyboardInterrupt:
            pass
        finally:
            _stop(socket)
    print(writer.summary(out), file=sys.stderr)


def _replies(socket: str | None, until_s: float) -> Iterator[pb.RecordReply]:
    """What was asked for, until the time is over; a last time then."""
    while True:
        over = time.monotonic() >= until_s
        reply: pb.RecordReply = call_admin(socket, "Record", pb.RecordRequest())
        yield reply
        if not reply.prompts:
            if over:
                return
            time.sleep(max(0.0, min(_POLL_S, until_s - time.monotonic())))


def _stop(socket: str | None) -> None:
    try:
        call_admin(socket, "Record", pb.RecordRequest(stop=True))
    except KvstoreError as error:  # it ends by itself when nobody asks any more; what came is written
        print(f"kvstore record: {error}", file=sys.stderr)


class Writer:
    """Turns prompts into rows. Hashes are keyed with a salt that is drawn here and kept nowhere.

    A trace has blocks of one size: those of the first prompt that says its own.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._block_tokens = 0
        self._start_ms = 0
        self.prompts = 0
        self._other_sizes = 0
        self._missed = 0

    def take(self, reply: pb.RecordReply) -> None:
        """Writes what a reply has, whole rows."""
        self._missed = reply.missed
        for prompt in reply.prompts:
            if not self._block_tokens and prompt.block_tokens:
                self._block_tokens, self._start_ms = prompt.block_tokens, prompt.time_ms
                self._put(header(block_tokens=self._block_tokens))
            if not prompt.block_tokens or prompt.block_tokens != self._block_tokens:
                self._other_sizes += 1
                continue
            self.prompts += 1
            self._put(row_of(self._turn(prompt)))
        self._file.flush()

    def summary(self, out: Path) -> str:
        """What was written and what was not, in a line."""
        text = f"no prompts came: {out} is no trace yet"
        if self._block_tokens:
            text = f"{format_count(self.prompts)} prompts in blocks of {self._block_tokens} tokens: {out}"
        if self._other_sizes:
            text += f"; {format_count(self._other_sizes)} with blocks of another or an unknown size left out"
        if self._missed:
            text += f"; {format_count(self._missed)} came too fast and are missing"
        return text

    def _turn(self, prompt: pb.RecordedPrompt) -> Turn:
        hashes = hashes_of(prompt.hashes)
        names = b"".join(
            hashlib.blake2b(block.tobytes(), digest_size=8, key=self._salt).digest() for block in hashes
        )
        return Turn(
            time_ms=prompt.time_ms - self._start_ms,
            ids=np.frombuffer(names, dtype="<i8"),
            # The daemon knows full blocks alone; of every prompt at least one token more is computed.
            prompt_tokens=len(hashes) * self._block_tokens + 1,
        )

    def _put(self, row: dict[str, object]) -> None:
        self._file.write(f"{json.dumps(row)}\n")
