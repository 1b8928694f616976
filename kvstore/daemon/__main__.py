"""`python -m kvstore.daemon --config TEXT`: the daemon, as the keeper or systemd starts it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from kvstore.daemon.app import Daemon
from kvstore.daemon.handover import config_from_toml
from kvstore.daemon.log import configure
from kvstore.daemon.notify import inherited_descriptors
from kvstore.errors import KvstoreError
from kvstore.keeper import CONFIG_EXIT

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Runs until a signal; 0 after a clean end, 78 where it must not be started again as it is."""
    parser = argparse.ArgumentParser(prog="kvstored", description=__doc__)
    parser.add_argument("--config", required=True, help="the configuration as TOML text")
    inherited = inherited_descriptors(os.environ, os.getpid())
    try:
        config = config_from_toml(parser.parse_args(arguments).config)
        configure(config.log_level)
        _run(lambda: Daemon(config, os.environ, inherited))
    except KvstoreError as error:
        print(f"kvstore: {' '.join(str(error).split())}", file=sys.stderr)
        # With memory at stake it is worth trying again: the keeper gives up on the memory when that does not help.
        return 1 if inherited else CONFIG_EXIT
    return 0


def _run(make: object) -> None:
    async def work() -> None:
        await make().run()  # type: ignore[operator]

    try:
        import uvloop
    except ImportError:
        asyncio.run(work())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
