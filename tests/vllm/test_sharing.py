"""One store, several engines: the bundled engine and vLLM load one folder, and read each other's blocks."""

from __future__ import annotations

import json
import os
import signal
import socket as unix
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import started
from tests.vllm.processes import MODEL, Vllm, connector, service_config

BLOCK = 32
ROUNDING = 2e-4
"""Of a log-probability: two engines add up 30 layers of fp32 in another order."""


@contextmanager
def bundled(place: Path, socket: str) -> Iterator[Callable[[Sequence[int], int], dict[str, Any]]]:
    """A worker of the bundled engine: `ask(tokens, max_tokens)`."""
    listen = place / "worker.sock"
    log = (place / "worker.log").open("ab")
    command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--model", str(MODEL)]
    command += ["--block-tokens", str(BLOCK), "--listen", str(listen), "--socket", socket, "--hbm", "128MiB"]
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )

    def ask(tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
        with unix.socket(unix.AF_UNIX) as client:
            client.settimeout(120)
            client.connect(str(listen))
            request = {"id": "1", "token_ids": list(tokens), "max_tokens": max_tokens, "ignore_eos": True}
            client.sendall(json.dumps(request).encode() + b"\n")
            for line in client.makefile():
                said = json.loads(line)
                assert said["event"] != "error", said
                if said["event"] == "done":
                    return dict(said)
        raise AssertionError("the worker closed the connection")

    try:
        assert worker.stdout is not None
        assert worker.stdout.readline(), (place / "worker.log").read_text()[-2000:]
        yield ask
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
        assert worker.stdout is not None
        worker.stdout.close()
        log.close()


def test_what_one_engine_computes_the_other_hits(
    place: Path, prompt: Callable[[int, int], list[int]]
) -> None:
    config = service_config(place)
    theirs, ours = prompt(1, 8 * BLOCK + 5), prompt(2, 8 * BLOCK + 5)
    with started(config) as service:
        with bundled(place, config.socket) as ask:
            computed = ask(theirs, 6)
            assert computed["cached_tokens"] == 0
            with Vllm(place / "vllm.log", connector=connector(config, layout="shared")) as vllm:
                assert vllm.call("attached")
                hit = vllm.generate(theirs)[0]
                assert hit.cached == 8 * BLOCK
                assert list(hit.tokens) == computed["token_ids"]
                cold = vllm.generate(theirs, salts=["computed by vLLM"])[0]
                assert (cold.cached, cold.tokens) == (0, hit.tokens)
                for one, other in zip(hit.logprobs, cold.logprobs, strict=True):
                    assert abs(float.fromhex(one) - float.fromhex(other)) < ROUNDING
                said = vllm.generate(ours)[0]
                assert said.cached == 0
            back = ask(ours, 6)
            assert back["cached_tokens"] == 8 * BLOCK
            assert back["token_ids"] == list(said.tokens)
        assert service.faults() == []
