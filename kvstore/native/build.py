"""Compiles each kvstore/native/NAME.c into kvstore/_NAME.abi3.so, where a C compiler and Python's headers are.

    python kvstore/native/build.py

The build hook and `make setup` both run this file. Without a compiler, or where it fails, it says so in one line and
leaves nothing: kvstore then does the same in Python. What comes out is ignored by git.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["build", "build_all"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvstore"
MODULES = ("hash_chain", "slab_io", "summed_copy")

_FLAGS = ("-std=c11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")
_COMPILE_S = 120.0


def build_all() -> str | None:
    """Compiles all of them; why not, in one line, where one is impossible: then there is none of it."""
    problems = [build(PACKAGE / f"_{name}.abi3.so", PACKAGE / "native" / f"{name}.c") for name in MODULES]
    return next((problem for problem in problems if problem is not None), None)


def build(target: Path, source: Path) -> str | None:
    """Compiles into `target`, all or nothing. Why not, in one line, where that is impossible; `target` is gone then.

    An older build is never left behind: it would be of another source than the one that lies here.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = Path(sysconfig.get_paths()["include"])
    problem = None
    if shutil.which(compiler[0]) is None:
        problem = f"there is no C compiler {compiler[0]}"
    elif not (include / "Python.h").is_file():
        problem = f"Python's headers are not in {include}"
    else:
        problem = _compile([*compiler, *_FLAGS, f"-I{include}", str(source)], target)
    if problem is not None:
        target.unlink(missing_ok=True)
    return problem


def _compile(command: list[str], target: Path) -> str | None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        made = Path(scratch) / target.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=_COMPILE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command[0]} failed: {error}"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}"
        made.replace(target)  # never in place: it may be mapped by a process that runs
    return None


def main() -> None:
    problem = build_all()
    if problem is None:
        print(f"built {', '.join(MODULES)} from {(PACKAGE / 'native').relative_to(ROOT)}")
    else:
        print(f"hashing and copies to disk stay in Python: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
