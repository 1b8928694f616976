"""A progress bar on standard error, where a person looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["showing"]


@contextmanager
def showing(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callable that is told of things done and things in all; it says nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
