"""Show a long prompt answered slowly once, and at once ever after, whatever is killed.

Starts a store and a worker of its own in a temporary folder, and cleans up. Exits with 1 when an answer differs or a
prompt was not found in the cache.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from engine_adapter.cli.demo_steps import Demo, DemoOptions, Row, check_space
from engine_adapter.cli.generate import read_prompt
from engine_adapter.cli.processes import Household
from engine_adapter.engine.source import find_model
from engine_adapter.fingerprint import model_geometry
from kvstore.errors import ConfigError, InvalidArgument, KvstoreError
from kvstore.units import parse_size

__all__ = ["demo"]

_MEANING = {
    "cold": "nothing is cached",
    "hbm": "asked again",
    "worker": "worker killed with -9",
    "daemon": "daemon and worker killed with -9, HBM released",
    "disk": "all killed with -9, only the slabs are left",
}
_MIN_CACHED = 0.95
_MAX_STATUS_CHARACTERS = 100


def demo(
    *,
    model: Annotated[str, typer.Option(help="`smollm2`, a Hugging Face folder or a GGUF file.")] = "smollm2",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Another long prompt than the shipped one.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.", min=1)] = 32,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Existing folder for the disk tier, which goes into a temporary folder in it."
        ),
    ] = None,
    dram: Annotated[str, typer.Option(help="DRAM tier.")] = "512MiB",
    nvme: Annotated[str, typer.Option(help="Disk tier.")] = "1GiB",
    hbm: Annotated[str, typer.Option(help="HBM of the device, or of its twin in host memory.")] = "512MiB",
    block_tokens: Annotated[int, typer.Option(help="Tokens in a block.")] = 32,
    threads: Annotated[int, typer.Option(help="CPU threads of the worker; 0: all cores.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The rows as JSON on stdout.")] = False,
) -> None:
    """Show a long prompt answered slowly once, and at once ever after, whatever is killed."""
    prompt = _shipped_prompt() if prompt_file is None else read_prompt(None, prompt_file).strip()
    slot_bytes = model_geometry(find_model(model), block_tokens=block_tokens, dtype="float32").slot_bytes
    model_path = model if not Path(model).exists() else str(Path(model).resolve())
    with (
        _folder(None) as folder,
        _folder(directory) as slabs,
        _household(folder, slabs) as household,
    ):
        options = DemoOptions(
            folder=folder,
            slabs=slabs,
            model=model_path,
            prompt=prompt,
            raw=raw,
            max_tokens=max_tokens,
            dram_bytes=_size("--dram", dram),
            nvme_bytes=_size("--nvme", nvme),
            hbm_bytes=_size("--hbm", hbm),
            min_slot_bytes=slot_bytes,
            block_tokens=block_tokens,
            threads=threads,
        )
        check_space(slabs, options.nvme_bytes)
        screen = _Screen()
        run = Demo(options=options, household=household, tell=screen.tell, show=screen.show)
        with screen.live:
            default_chunks_s = run.run()
    _report(run, default_chunks_s, as_json=as_json)
    _judge(run.rows)


def _shipped_prompt() -> str:
    return files("engine_adapter").joinpath("prompts/wonderland.txt").read_text(encoding="utf-8").strip()


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except KvstoreError as error:
        raise ConfigError(f"{flag}: {error.message}") from error


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A temporary folder of the demo's own, gone at the end."""
    if parent is not None and not parent.is_dir():
        raise InvalidArgument(f"--dir {parent}: no such folder; make it first")
    folder = Path(tempfile.mkdtemp(prefix="kvstore-demo-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _household(*folders: Path) -> Iterator[Household]:
    """Our processes; whatever ends the demo, SIGKILL too, ends them and removes the folders."""
    household = Household()
    household.watch(folders)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield household
    finally:
        try:
            household.kill_everything()
        finally:
            household.dismiss()
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # as the shell shows it; everything on the way out is cleaned up


class _Screen:
    """The table as it grows, on stderr; lines instead where that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._rows: list[Row] = []
        self._status = ""
        self.live = Live(
            console=self._console, refresh_per_second=8, transient=True, get_renderable=self._render
        )

    def tell(self, text: str) -> None:
        step = text.partition(":")[0]
        if not self._console.is_terminal and step != self._status.partition(":")[0]:
            print(text, file=sys.stderr, flush=True)
        self._status = " ".join(text.split())

    def show(self, row: Row) -> None:
        self._rows.append(row)
        if not self._console.is_terminal:
            print(
                f"{row.step}: first token after {row.ttft_s:.2f} s, {row.cached_tokens:,} of {row.prompt_tokens:,} "
                f"cached ({_tiers(row.cached_by_tier) or 'nowhere'}), {'same' if row.identical else 'ANOTHER'} answer",
                file=sys.stderr,
                flush=True,
            )

    def _render(self) -> RenderableType:
        status = self._status
        if len(status) > _MAX_STATUS_CHARACTERS:
            status = "…" + status[-_MAX_STATUS_CHARACTERS:]
        return Group(_table(self._rows), Spinner("dots", Text(status)))


def _table(rows: list[Row]) -> Table:
    size = f" of {rows[0].prompt_tokens:,} tokens" if rows else ""
    table = Table(title=f"One prompt{size}, asked again and again", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("step", no_wrap=True)
    table.add_column("what happened before", style="dim")
    for name in ("first\ntoken", "speed\nup", "since\nkill -9", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("found\nin", no_wrap=True)
    table.add_column("same\nanswer", no_wrap=True)
    for row in rows:
        kill = row.kill_to_first_token_s
        cold = row.step == "cold"
        table.add_row(
            row.step,
            _MEANING[row.step],
            f"{row.ttft_s:.2f} s",
            "" if cold else f"{row.speedup:.0f}x",
            "" if kill is None else f"{kill:.1f} s",
            f"{row.cached_tokens / row.prompt_tokens:.1%}",
            _tiers(row.cached_by_tier),
            "" if cold else ("[green]yes[/]" if row.identical else "[red]NO[/]"),
        )
    return table


def _tiers(cached_by_tier: Mapping[str, int]) -> str:
    """Where the prompt was found; counts only where it was in several places."""
    found = {tier: count for tier, count in cached_by_tier.items() if count}
    return (
        ", ".join(found)
        if len(found) < 2
        else ", ".join(f"{tier} {count:,}" for tier, count in found.items())
    )


def _report(run: Demo, default_chunks_s: float, *, as_json: bool) -> None:
    if as_json:
        rows = [asdict(row) for row in run.rows]
        print(
            json.dumps(
                {"rows": rows, "cold_default_chunks_ttft_s": default_chunks_s, "answer": run.answer}, indent=2
            )
        )
        return
    console = Console()
    console.print(_table(run.rows))
    console.print(
        f"cold at the default chunk size, without --deterministic and without the store: {default_chunks_s:.2f} s",
        highlight=False,
    )
    console.print(Text(f"answer: {' '.join(run.answer.split())}"))


def _judge(rows: list[Row]) -> None:
    """Raises KvstoreError where the demo did not show what it is there to show."""
    different = [row.step for row in rows if not row.identical]
    if different:
        raise KvstoreError(f"the answer differs from the cold one in: {', '.join(different)}")
    missed = [row.step for row in rows[1:] if row.cached_tokens < _MIN_CACHED * row.prompt_tokens]
    if missed:
        raise KvstoreError(
            f"less than {_MIN_CACHED:.0%} of the prompt was cached in: {', '.join(missed)}; "
            "larger --hbm, --dram and --nvme may help"
        )
