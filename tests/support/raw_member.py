"""A worker process for tests: attaches, fills a prompt, takes slots to fill, says so in JSON, and waits to be killed.

python -m tests.support.raw_member SOCKET [--fork] [--tokens N] [--hbm-slots N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tests.support.raw_client import RawClient


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--fork", action="store_true", help="leave a child that has everything mapped")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--hbm-slots", type=int, default=64)
    given = parser.parse_args()
    client = RawClient(given.socket).begin(hbm_slots=given.hbm_slots)
    hashes, filled = client.fill(range(given.tokens))
    half = client.acquire(client.chain(range(1000, 1016)), lease=2, reserve_slots=2)
    assert client.attached is not None
    child = 0
    if given.fork:
        # gRPC's threads do not survive a fork: a child of plain Python, which inherits the liveness socket.
        assert client.connection is not None
        os.set_inheritable(client.connection.fileno(), True)
        child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(300)"])
    report = {
        "pid": os.getpid(),
        "child": child,
        "session": client.attached.session,
        "token": client.token.hex(),
        "hashes": hashes.tobytes().hex(),
        "filled": filled.hbm.tolist(),
        "half": [*half.hbm.tolist(), *half.reserve.tolist()],
    }
    print(json.dumps(report), flush=True)
    time.sleep(300)


if __name__ == "__main__":
    main()
