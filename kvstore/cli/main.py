"""The `kvstore` program: finds commands by entry point, imports only the one that is called, prints errors in one line.

A command is registered in the group `kvstore.commands` (pyproject.toml) as a function for typer, or as a `typer.Typer`
for a group of commands, in a module whose docstring's first line is the help that `kvstore --help` shows. That line is
read from the source without importing it, so help stays fast and needs no optional dependency.

Exit codes: 0 done; 1 failed; 2 wrong usage or configuration; 130 interrupted.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvstore import __version__
from kvstore.errors import KvstoreError, MissingExtra

__all__ = ["main"]

_COMMANDS = "kvstore.commands"
_INTERRUPTED = 130  # 128 + SIGINT, as the shell shows it

# Which extra brings a module that a command may miss.
_EXTRAS = {
    "cuda": "cuda",
    "cupy": "cuda",
    "gguf": "engine",
    "matplotlib": "sim",
    "pynvml": "cuda",
    "safetensors": "engine",
    "tokenizers": "engine",
    "torch": "engine",
    "transformers": "dev",
    "vllm": "vllm",
    "zstandard": "sim",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _build(arguments)(args=arguments, prog_name="kvstore")
    except (KvstoreError, ModuleNotFoundError) as error:
        if os.environ.get("KVSTORE_DEBUG"):
            raise
        known = _missing(error) if isinstance(error, ModuleNotFoundError) else error
        print(f"kvstore: {_one_line(known)}", file=sys.stderr)
        sys.exit(known.exit_code)
    except KeyboardInterrupt:  # before typer runs: a command's imports take seconds
        _interrupted()
    except SystemExit as done:
        if done.code != _INTERRUPTED:
            raise
        _interrupted()  # typer has made it of a KeyboardInterrupt, without a word
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone. Python flushes stdout at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _interrupted() -> NoReturn:
    print("kvstore: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)


def _build(arguments: Sequence[str]) -> typer.Typer:
    """The program, with the command that `arguments` call in full and of the others only name and help."""
    app = typer.Typer(
        name="kvstore",
        help="Tiered KV-cache memory service for LLM inference.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for point in sorted(entry_points(group=_COMMANDS), key=lambda point: point.name):
        source = _source_of(point.module)
        if source is None:
            continue
        if point.name == called:
            _add(app, point.name, point.load(), _help_of(source))
        else:
            app.command(point.name, help=_help_of(source))(_not_called)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)


def _root(*, version: Annotated[bool, _VERSION] = False) -> None:
    """Typer reads the program's own options from this signature; their callbacks do the work."""


def _not_called() -> None:
    """Stands for a command that this run does not call."""


def _add(app: typer.Typer, name: str, command: object, help_line: str) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, help=help_line)
    elif callable(command):
        app.command(name)(command)
    else:
        raise KvstoreError(
            f"the command {name!r} is registered as {command!r}, which is neither a function nor a Typer"
        )


def _missing(error: ModuleNotFoundError) -> KvstoreError:
    """A module that a command imports is not there: which extra brings it."""
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return KvstoreError(f"the module {error.name!r} is needed and not installed")
    return MissingExtra(f"{module} is needed and not installed: pip install 'kvstore[{extra}]'")


def _source_of(module: str) -> Path | None:
    """The file of `module`, found without running it; None where this installation does not have it."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _help_of(source: Path) -> str:
    """The first line of the docstring of the module in `source`."""
    docstring = ast.get_docstring(ast.parse(source.read_bytes())) or ""
    return docstring.partition("\n")[0]


def _one_line(error: KvstoreError) -> str:
    text = " ".join(str(error).split())
    if error.retry_after_s is not None:
        text = f"{text} (try again in {error.retry_after_s:g} s)"
    return text


if __name__ == "__main__":
    main()
