"""Starts the daemon with the next fault of a plan: `python -m tests.support.faulty_daemon PLAN ARGUMENT …`.

The keeper starts this in place of `kvstore.daemon`, which it then becomes. PLAN is a file of one line a life: what
$KVSTORE_FAULT is in it, perhaps nothing. Each start takes the first line away.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvstore.faults import FAULT_VARIABLE


def main(arguments: list[str]) -> None:
    """Takes a line and becomes the daemon."""
    plan = Path(arguments[0])
    first, *rest = plan.read_text().splitlines() or [""]
    plan.write_text("".join(f"{line}\n" for line in rest))
    os.environ.pop(FAULT_VARIABLE, None)
    if first:
        os.environ[FAULT_VARIABLE] = first
    os.execv(sys.executable, [sys.executable, "-m", "kvstore.daemon", *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
