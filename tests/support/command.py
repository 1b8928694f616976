"""`kvstore` as a person calls it, within the test's process: one of its own takes as long as its imports do.

What is about the process itself (signals, pipes, deaths, what a start imports) starts one, and so does a command that
takes charge of its process as `demo` does: it kills all that its process ever started.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from typing import NoReturn

import pytest

from kvstore.cli.main import main

__all__ = ["Done", "kvstore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def kvstore(*arguments: str, **environ: str) -> Done:
    """Runs a command to its end, with these variables of the environment besides. What a shell would show of it.

    An error that would be a traceback there is raised.
    """
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", _become)
        for name, value in environ.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _exit_code(arguments)
    return Done(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def _become(path: str, command: list[str]) -> NoReturn:
    raise AssertionError(f"the test would have become another program: {command}")


def _exit_code(arguments: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    code = end.value.code or 0
    assert isinstance(code, int), "the program exits with numbers alone"
    return code
