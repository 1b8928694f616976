"""An engine process of a benchmark: asked one prompt at a time, timed inside, and killed by whoever started it.

    python -m bench.asked {"worker.model": …, "socket": …, …}

The one argument are settings, by key (`kvstore.cli.settings`). The process prints one JSON object when it is ready,
with the moments of its start, then reads one JSON object a line: `{"tokens": …, "seed": …, …}` asks a
prompt, `{"together": …}` several at once, `{"raw_bytes": …}` times a plain pinned copy. It ends when its input does.
While nobody asks, the engine is stepped, so that copies of blocks that are under way are reported. Times are those of
the monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.prompts import random_prompt
from bench.timing import median
from engine_adapter.cli.assembly import EngineOptions, open_engine, share_the_cpu
from kvstore.cli.settings import load_settings
from kvstore.errors import DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from engine_adapter.engine.engine import Engine

__all__ = ["Answer", "AskedWorker", "Mark", "Start", "Together", "options_of", "spawn_asked"]

_ROOT = Path(__file__).resolve().parent.parent
_IDLE_S = 0.005
_STOP_S = 30.0
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a start: from it on, `doing` is what was done."""

    doing: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Of a process that takes prompts: the moments of its start, and the seconds of what a thread did meanwhile."""

    marks: list[Mark]
    beside: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one prompt got. `step_s`: median time between two tokens; 0 where there were fewer than three."""

    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    ttft_s: float
    first_token_at: float
    step_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What prompts got that were asked at the same moment."""

    ttft_s: tuple[float, ...]
    """Of each, in the order in which they were asked."""
    seconds: float
    """Until the last answer was complete."""
    cached_tokens: int
    """Of all together."""


def options_of(flags: Mapping[str, str]) -> EngineOptions:
    """How to open an engine with these settings; without `socket`, without a store. Raises: ConfigError."""
    config = load_settings(flags).config
    return EngineOptions(
        worker=config.worker,
        store=Path(flags["socket"]) if "socket" in flags else None,
        deterministic=False,
        timeout_s=config.client.timeout_s,
    )


class AskedWorker:
    """The process, seen from the one that started it. Waits are bounded by `timeout_s`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
        self._process = process
        self._log = log
        self._timeout_s = timeout_s
        self._buffer = b""

    def ready(self) -> Start:
        """Waits until it takes prompts."""
        started = self._read()
        return Start(
            marks=[Mark(doing=doing, at=at) for doing, at in started["marks"]], beside=started["beside"]
        )

    def ask(
        self, *, tokens: int, seed: int, new_tokens: int, question_tokens: int = 0, question_seed: int = 0
    ) -> Answer:
        """One prompt of random tokens, a question behind it where one is wanted, and the answer."""
        found = self._call(
            {
                "tokens": tokens,
                "seed": seed,
                "question_tokens": question_tokens,
                "question_seed": question_seed,
                "new_tokens": new_tokens,
            }
        )
        return Answer(**found | {"token_ids": tuple(found["token_ids"])})

    def ask_together(self, *, tokens: int, seeds: Sequence[int], new_tokens: int) -> Together:
        """Prompts of random tokens, all asked at the same moment; `seeds` may name one more than once."""
        found = self._call({"together": {"tokens": tokens, "seeds": list(seeds), "new_tokens": new_tokens}})
        return Together(**found | {"ttft_s": tuple(found["ttft_s"])})

    def raw_bytes_per_s(self, nbytes: int) -> float:
        """The rate of a plain copy of so many bytes to its device."""
        return float(self._call({"raw_bytes": nbytes})["bytes_per_s"])

    def kill(self) -> float:
        """SIGKILL; when. Returns once the process has ended."""
        at = time.monotonic()
        self._process.kill()
        self._process.wait()
        return at

    def stop(self) -> None:
        """Ends it, by force where it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def _call(self, command: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """The next object. Raises: Unavailable with the end of its log when it ended, DeadlineExceeded."""
        assert self._process.stdout is not None
        deadline, stdout = time.monotonic() + self._timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise DeadlineExceeded(
                    f"the engine process said nothing for {self._timeout_s:g} s: {self._tail()}"
                )
            data = os.read(stdout, 1 << 16)
            if not data:
                raise Unavailable(f"the engine process ended: {self._tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-_TAIL_LINES:]) or "it said nothing"


@contextmanager
def spawn_asked(flags: Mapping[str, str], log: Path, timeout_s: float) -> Iterator[AskedWorker]:
    """Starts an engine process; it has ended at the end of the `with`. `log` gets what it says on standard error."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.asked", json.dumps(dict(flags))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            cwd=_ROOT,
        )
    worker = AskedWorker(process, log, timeout_s)
    try:
        yield worker
    finally:
        worker.stop()


def main(flags: Mapping[str, str]) -> None:
    """The program of the process."""
    marks: list[tuple[str, float]] = [("configuration", time.monotonic())]
    share_the_cpu()
    options = options_of(flags)
    beside: dict[str, float] = {}
    marks.append(("finding the model and the device", time.monotonic()))
    with open_engine(options, lambda doing: marks.append((doing, time.monotonic())), beside.update) as engine:
        marks.append(("ready", time.monotonic()))
        _say({"marks": marks, "beside": beside})
        for command in _commands(engine):
            _say(_carried_out(engine, command))


def _carried_out(engine: Engine, command: dict[str, Any]) -> Mapping[str, object]:
    if "raw_bytes" in command:
        return _raw(command["raw_bytes"], engine)
    return _ask_together(engine, **command["together"]) if "together" in command else _ask(engine, **command)


def _say(value: Mapping[str, object]) -> None:
    print(json.dumps(value), flush=True)


def _commands(engine: Engine) -> Iterator[dict[str, Any]]:
    """Lines of standard input; the engine is stepped while there are none."""
    buffer = b""
    while True:
        if not select.select([0], [], [], _IDLE_S)[0]:
            engine.step()
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from (json.loads(line) for line in lines)


def _ask(
    engine: Engine, *, tokens: int, seed: int, new_tokens: int, question_tokens: int, question_seed: int
) -> dict[str, object]:
    from engine_adapter.engine.sampler import SamplingParams

    vocabulary = engine.loaded.config.vocab_size
    prompt = random_prompt(seed, tokens, vocabulary) + random_prompt(
        question_seed, question_tokens, vocabulary
    )
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    start = time.monotonic()
    engine.add_request(prompt, params)
    times: list[float] = []
    token_ids: list[int] = []
    for output in engine.run():
        if output.token_ids:
            times.append(time.monotonic())
            token_ids += output.token_ids
        if output.error is not None:
            raise output.error
        stats = output.stats
    assert stats is not None, "the last output has the statistics"
    steps = [later - earlier for earlier, later in pairwise(times[1:])]
    answer = Answer(
        prompt_tokens=len(prompt),
        cached_tokens=stats.cached_tokens,
        cached_by_tier=dict(stats.cached_by_tier),
        ttft_s=times[0] - start,
        first_token_at=times[0],
        step_s=median(steps) if steps else 0.0,
        token_ids=tuple(token_ids),
    )
    return asdict(answer)


def _ask_together(engine: Engine, *, tokens: int, seeds: list[int], new_tokens: int) -> dict[str, object]:
    from engine_adapter.engine.sampler import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    prompts = [random_prompt(seed, tokens, engine.loaded.config.vocab_size) for seed in seeds]
    start = time.monotonic()
    order = [engine.add_request(prompt, params) for prompt in prompts]
    first: dict[str, float] = {}
    cached = 0
    for output in engine.run():
        if output.error is not None:
            raise output.error
        if output.token_ids:
            first.setdefault(output.request_id, time.monotonic() - start)
        if output.stats is not None:
            cached += output.stats.cached_tokens
    together = Together(
        ttft_s=tuple(first[request] for request in order),
        seconds=time.monotonic() - start,
        cached_tokens=cached,
    )
    return asdict(together)


def _raw(nbytes: int, engine: Engine) -> dict[str, object]:
    from bench.rates import pinned_copy_bytes_per_s

    return {"bytes_per_s": pinned_copy_bytes_per_s(engine.loaded.model.device, nbytes)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
