"""`python -m kvstore.daemon --config TEXT`: the daemon, as the keeper or systemd starts it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import traceback
from typing import NoReturn

from kvstore.config import ServeConfig
from kvstore.daemon.app import Daemon
from kvstore.daemon.handover import config_from_toml
from kvstore.daemon.log import configure
from kvstore.daemon.notify import inherited_descriptors
from kvstore.errors import ConfigError, KvstoreError
from kvstore.keeper import CONFIG_EXIT, REFUSED_EXIT

__all__ = ["main"]

_CRASH_EXIT = 1


def main(arguments: list[str]) -> NoReturn:
    """Runs until a signal. Exits with 0 after a clean end, 78 or 69 where it must not be started again as it is."""
    parser = argparse.ArgumentParser(prog="kvstored", description=__doc__)
    parser.add_argument("--config", required=True, help="the configuration as TOML text")
    inherited = inherited_descriptors(os.environ, os.getpid())
    try:
        config = config_from_toml(parser.parse_args(arguments).config)
    except KvstoreError as error:
        _leave(_say(error))
    configure(config.log_level)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_work(config, inherited))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(config, inherited))
    raise AssertionError("the daemon's work never returns")


async def _work(config: ServeConfig, inherited: dict[str, int]) -> NoReturn:
    daemon = Daemon(config, os.environ, inherited)
    try:
        await daemon.run()
    except KvstoreError as error:
        if daemon.ready:
            traceback.print_exc()
            _leave(_CRASH_EXIT)
        code = _say(error)
        # With memory at stake it is worth trying again: the keeper gives up on the memory when that does not help.
        _leave(_CRASH_EXIT if inherited else code)
    except BaseException:  # noqa: BLE001 (the process's boundary: the keeper starts a sound daemon)
        traceback.print_exc()
        _leave(_CRASH_EXIT)
    _leave(0)


def _say(error: KvstoreError) -> int:
    print(f"kvstore: {' '.join(str(error).split())}", file=sys.stderr)
    return CONFIG_EXIT if isinstance(error, ConfigError) else REFUSED_EXIT


def _leave(code: int) -> NoReturn:
    """Ends at once. An orderly end of the interpreter would wait for threads, and one may hang in a disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
