"""The demo's table with the real vLLM: `make demo-vllm`, or `python -m bench.vllm_demo` once that has set it up.

Runs vLLM's server with the flag that `kvstore vllm-args` prints, in the environment of `make test-vllm`, over the
demo's prompt, and asks again from vLLM's own cache and after each kill -9. Times are a client's: from the request sent
over HTTP, as text, to the first token that comes back.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine_adapter.cli.processes import Child, Household
from engine_adapter.cli.vllm_args import transfer_config
from kvstore.client import Client, connect
from kvstore.errors import DeadlineExceeded, KvstoreError, Unavailable

__all__ = ["Row", "main"]

_START_S, _ANSWER_S, _SETTLE_S, _POLL_S = 300.0, 600.0, 60.0, 0.02
_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Times in seconds; `kill_to_first_token_s` None where nothing was killed."""

    step: str
    what: str
    ttft_s: float
    kill_to_first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    text: str
    ttft_s: float
    first_token_at: float
    prompt_tokens: int
    cached_tokens: int


class _Demo:
    """Processes and rows."""

    def __init__(self, options: argparse.Namespace, household: Household, folder: Path, prompt: str) -> None:
        self._options = options
        self._household = household
        self._folder = folder
        self._prompt = prompt
        self._port = _free_port()
        self._vllm: Child | None = None
        self._service: Child | None = None
        self._cold: _Answer | None = None
        self.rows: list[Row] = []

    def run(self) -> None:
        self._serve()
        self._start_vllm()
        self._row("cold", "nothing cached", None)
        self._row("vllm", "asked again", None)
        self._await_stored()
        killed = self._kill_vllm()
        self._start_vllm()
        self._row("worker", "vLLM `kill -9`, restarted", killed)
        with self._client() as client:
            before = client.describe()
            killed = self._kill_vllm()
            self._household.kill([before.pid])
            _until("the daemon is back", lambda: client.describe().boot_epoch != before.boot_epoch)
        self._start_vllm()
        self._row("daemon", "daemon and vLLM `kill -9`", killed)
        with self._client() as client:
            if client.flush(_SETTLE_S).pending_blocks:
                raise DeadlineExceeded("not every block reached the disk in time")
        killed = time.monotonic()
        self._household.kill_everything()
        self._serve()
        self._start_vllm()
        self._row("disk", "everything `kill -9`, only the slabs left", killed)

    def _row(self, step: str, what: str, killed_at: float | None) -> None:
        answer = self._ask()
        cold = self._cold = self._cold or answer
        row = Row(
            step=step,
            what=what,
            ttft_s=answer.ttft_s,
            kill_to_first_token_s=None if killed_at is None else answer.first_token_at - killed_at,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            identical=answer.text == cold.text,
        )
        self.rows.append(row)
        print(_line(row), flush=True)

    def _ask(self) -> _Answer:
        body = {
            "model": "demo",
            "prompt": self._prompt,
            "max_tokens": 32,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        usage: dict[str, Any] = {}
        began, first, text = time.monotonic(), 0.0, ""
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            for line in connection.getresponse():
                if not line.startswith(b"data: {"):
                    continue
                said = json.loads(line[6:])
                if said.get("choices"):
                    first = first or time.monotonic()
                    text += said["choices"][0]["text"]
                usage = said.get("usage") or usage
        if not first:
            raise Unavailable(f"vLLM gave no answer; {self._tail()}")
        details = usage.get("prompt_tokens_details") or {}
        return _Answer(
            text=text,
            ttft_s=first - began,
            first_token_at=first,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def _serve(self) -> None:
        options = self._options
        command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", self._socket]
        command += ["--dram", options.dram, "--nvme", f"{self._folder / 'nvme'}:{options.nvme}"]
        self._service = self._household.start("the store", command, _environ(), self._folder / "serve.log")
        with self._client() as client:
            _until("the store is ready", lambda: client.stats().ready)

    def _start_vllm(self) -> None:
        """Returns when it takes requests."""
        options = self._options
        flag = json.dumps(transfer_config({"socket": self._socket}, on_failure="recompute"))
        command = [
            str(options.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(options.model),
        ]
        command += ["--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
        command += [
            "--block-size",
            str(_BLOCK_TOKENS),
            "--max-model-len",
            "8192",
            "--num-gpu-blocks-override",
            "260",
        ]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--enable-prompt-tokens-details"]
        command += ["--kv-transfer-config", flag]
        self._vllm = self._household.start("vLLM", command, _environ(), self._folder / "vllm.log")

        def healthy() -> bool:
            if self._vllm is not None and not self._vllm.alive():
                raise KvstoreError(f"vLLM ended; {self._tail()}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                return connection.getresponse().status == http.HTTPStatus.OK

        _until("vLLM takes requests", healthy, _START_S)

    def _kill_vllm(self) -> float:
        """All of its processes, and nothing of the store's; when."""
        assert self._service is not None
        kept = {self._service.pid}
        with self._client() as client:
            described = client.describe()
            kept |= {described.pid, described.keeper_pid}
        pids = [pid for pid in self._household.descendants() if pid not in kept and _is_vllm(pid)]
        killed = time.monotonic()
        self._household.kill(pids)
        return killed

    def _await_stored(self) -> None:
        """Every full block of the prompt is in DRAM."""
        assert self._cold is not None
        blocks = (self._cold.prompt_tokens - 1) // _BLOCK_TOKENS
        with self._client() as client:
            _until(
                f"{blocks} blocks are in DRAM",
                lambda: any(t.tier == "dram" and t.sealed_slots >= blocks for t in client.stats().tiers),
            )

    def _client(self) -> Client:
        return connect(self._socket, timeout_s=5.0)

    @property
    def _socket(self) -> str:
        return str(self._folder / "kv.sock")

    def _tail(self) -> str:
        return "" if self._vllm is None else self._vllm.tail()


def _is_vllm(pid: int) -> bool:
    """Its processes rename themselves, so both names are looked at."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().lower()
        return b"vllm" in line or b"multiprocessing" in line
    return False


def _until(what: str, done: Callable[[], bool], timeout_s: float = _SETTLE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(Unavailable, DeadlineExceeded, OSError, http.client.HTTPException):
            if done():
                return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited in vain until {what}")
        time.sleep(_POLL_S)


def _environ() -> dict[str, str]:
    """Ours without any setting of the store, and offline."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return kept | offline | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _line(row: Row) -> str:
    since = "" if row.kill_to_first_token_s is None else f"{row.kill_to_first_token_s:.1f} s"
    return (
        f"| {row.step} | {row.what} | {row.ttft_s:.2f} s | {since} | {row.cached_tokens:,} of {row.prompt_tokens:,} "
        f"| {'yes' if row.identical else 'no'} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table as it grows, and all of it as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, default=Path(".venv-vllm/bin/python"), help="vLLM's environment"
    )
    parser.add_argument(
        "--model", type=Path, default=Path(".venv-vllm/smollm2"), help="a folder that vLLM loads"
    )
    parser.add_argument("--dram", default="1GiB")
    parser.add_argument("--nvme", default="1GiB")
    parser.add_argument("--json", type=Path, help="where the rows go as JSON too")
    options = parser.parse_args(arguments)
    for needed in (options.python, options.model):
        if not needed.exists():
            parser.error(f"{needed} is not there: `make demo-vllm` sets it up")
    prompt = files("engine_adapter").joinpath("prompts/wonderland.txt").read_text(encoding="utf-8").strip()
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    household = Household()
    household.watch([folder])
    print(
        "| step | what happened | TTFT | kill → first token | cached | identical |\n|---|---|---|---|---|---|"
    )
    try:
        demo = _Demo(options, household, folder, prompt)
        demo.run()
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in demo.rows], indent=2) + "\n")
    except KvstoreError as error:
        sys.exit(f"kvstore: {error}")
    finally:
        household.kill_everything()
        household.dismiss()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
