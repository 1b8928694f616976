"""A real vLLM in a process of its own, as a test drives it (`tests.vllm.driver` is the other end)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvstore.config import ServeConfig
from kvstore.units import MIB
from tests.support.daemon import Service, small_config, wait_for

__all__ = ["MODEL", "PYTHON", "Answer", "Vllm", "await_slots_back", "connector", "service_config"]

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
PYTHON = ENVIRONMENT / "bin/python"
MODEL = ENVIRONMENT / "smollm2"
_PATIENCE_S = 60.0
"""Of a connector: longer than a busy machine keeps a daemon from answering. These tests ask whether it is a hit, not
how soon."""
_TAIL_LINES, _TAIL_CHARACTERS = 20, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one prompt. Log-probabilities are exact, as text; `gaps` is between the two best tokens at each place."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]
    gaps: tuple[float, ...]
    cached: int
    finish: str
    ttft_s: float | None

    @property
    def said(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What must be the same, bit for bit."""
        return self.tokens, self.logprobs


class Vllm:
    """One engine. A context manager that ends it."""

    def __init__(self, log: Path, **options: Any) -> None:
        """`options`: of vLLM's `LLM`, and `connector`, the options of ours (None: without). Returns when ready."""
        options = {"model": str(MODEL), "num_gpu_blocks_override": 64, **options}
        self._log = log.open("ab")
        self.log = log
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.vllm.driver", json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        try:
            assert self._read() == {"ready": True}
        except BaseException:
            self._close()
            raise

    def generate(self, *prompts: Sequence[int], max_tokens: int = 6, **more: Any) -> list[Answer]:
        """All at once, greedily."""
        said = {
            "do": "generate",
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            **more,
        }
        return [
            Answer(
                tokens=tuple(one["tokens"]),
                logprobs=tuple(one["logprobs"]),
                gaps=tuple(one["gaps"]),
                cached=one["cached"],
                finish=one["finish"],
                ttft_s=one["ttft_s"],
            )
            for one in self._ask(said)
        ]

    def reset(self, *, connector: bool = False) -> None:
        """Forgets vLLM's own prefix cache; with `connector`, ours too."""
        assert self._ask({"do": "reset", "connector": connector})

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of `tests.vllm.inside`, there."""
        return self._ask({"do": "call", "name": name, "arguments": list(arguments)})

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._write({"do": "end"})
                self.process.wait(60)
        self._close()

    def _close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for end in (self.process.stdin, self.process.stdout, self._log):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()

    def _ask(self, said: dict[str, Any]) -> Any:
        self._write(said)
        answer = self._read()
        if "error" in answer:
            raise AssertionError(f"{answer['error']}; {self.tail()}")
        return answer["value"]

    def _write(self, said: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        """A line; pytest's own time-out ends a wait for a process that hangs."""
        assert self.process.stdout is not None
        began = time.monotonic()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"vLLM has ended after {time.monotonic() - began:.0f} s; {self.tail()}")
        return json.loads(line)

    def tail(self) -> str:
        """The end of its log, in one line. vLLM's own lines may have thousands of characters."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return " | ".join(line[:_TAIL_CHARACTERS] for line in lines)


def await_slots_back(service: Service, vllm: Vllm) -> None:
    """Returns when nobody holds any DRAM slot but those that vLLM has in hand, to fill. Raises TimeoutError."""
    wait_for("slots back", lambda: service.tier("dram").held_slots <= vllm.call("slots_in_hand"))


def connector(config: ServeConfig, **changes: Any) -> dict[str, Any]:
    """Options of a connector to a service, which waits for the daemon as long as a busy machine takes."""
    patience = ("lookup_patience_s", "load_patience_s", "return_patience_s", "timeout_s")
    return {"socket": config.socket, **dict.fromkeys(patience, _PATIENCE_S), **changes}


def service_config(folder: Path, **changes: Any) -> ServeConfig:
    """A service that holds some hundred blocks of the model (1.4 MiB each), in DRAM and on disk."""
    sizes = {
        "dram_bytes": 512 * MIB,
        "dram_extent_bytes": 64 * MIB,
        "nvme_bytes": 512 * MIB,
        "nvme_extent_bytes": 64 * MIB,
    }
    return small_config(folder, **{**sizes, **changes})
