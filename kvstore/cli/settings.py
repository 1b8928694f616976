"""Reads the configuration of this process: its environment, its user and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.settings import Resolved, resolve

__all__ = ["load_settings"]

_FILE_VARIABLE = "KVSTORE_CONFIG"
_SYSTEM_FILE = Path("/etc/kvstore/config.toml")


def load_settings(flags: Mapping[str, object] | None = None, *, file: Path | None = None) -> Resolved:
    """The effective configuration, and where each value came from.

    `flags` are values by key (`dram`, `limits.call_deadline`), None where the command line gave none. The file is
    `file`, else $KVSTORE_CONFIG, else the user's, else the system's; only the last two may be absent, or in a folder
    that this process may not enter.
    Raises ConfigError with one line that says what to do.
    """
    path = _find_file(file)
    text = None if path is None else _read(path)
    name = "" if path is None else str(path)
    return resolve(flags=flags or {}, environ=os.environ, uid=os.getuid(), file=text, file_name=name)


def _find_file(named: Path | None) -> Path | None:
    if named is not None:
        return named
    if variable := os.environ.get(_FILE_VARIABLE):
        return Path(variable)
    return next((path for path in (*_user_file(), _SYSTEM_FILE) if _is_there(path)), None)


def _user_file() -> tuple[Path, ...]:
    """Where this user's file would be; nowhere for a user without a home, as in a container."""
    try:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    except RuntimeError:
        return ()
    return (folder / "kvstore" / "config.toml",)


def _is_there(path: Path) -> bool:
    """False also where nobody may look: HOME is often still another user's under sudo and setpriv."""
    try:
        return path.is_file()
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from error
