"""Plots of results, one a benchmark, from the files that `kvstore bench all` or `--out` wrote. Needs matplotlib.

matplotlib is imported when something is drawn, and only its object interface is used: no window, no global state.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_folder"]

Result = Mapping[str, Any]

_WIDTH_IN = 9.0
_HEIGHT_IN = 4.5
_TIERS = (("recompute_s", "recompute"), ("disk_s", "disk"), ("dram_s", "DRAM"), ("hbm_s", "HBM"))


def draw_folder(folder: Path) -> list[Path] | None:
    """Draws every `<name>.json` that there is a plot for as `<name>.png` beside it; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    drawn = []
    for name in _DRAWERS:
        file = folder / f"{name}.json"
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            drawn.append(draw(name, stored["results"], stored["machine"], folder / f"{name}.png"))
    return drawn


def draw(name: str, result: Result, machine: Mapping[str, Any], path: Path) -> Path:
    """Draws one result. The machine and the commit stand below: a figure without its machine is worth nothing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    _DRAWERS[name](figure, result)
    device = machine.get("gpu") or machine["cpu"]
    figure.supxlabel(
        f"kvstore bench {name} · {device} · {machine['taken'][:10]} · commit {machine['commit'] or 'unknown'}",
        fontsize=7,
    )
    figure.savefig(path, dpi=150)
    return path


def _copy(figure: Figure, result: Result) -> None:
    """Rates by block size; one panel a way, raw copies dashed."""
    ways = list(dict.fromkeys(leg["way"] for leg in result["legs"]))
    panels = figure.subplots(1, len(ways), squeeze=False, sharey=True)[0]
    for axes, way in zip(panels, ways, strict=True):
        legs = [leg for leg in result["legs"] if leg["way"] == way]
        for pattern in dict.fromkeys(leg["pattern"] for leg in legs):
            mine = sorted(
                (leg for leg in legs if leg["pattern"] == pattern), key=lambda leg: int(leg["block_bytes"])
            )
            sizes = [leg["block_bytes"] / 1024 for leg in mine]
            (line,) = axes.plot(sizes, [leg["gb_per_s"] for leg in mine], marker="o", label=pattern)
            raw = [leg["raw_gb_per_s"] for leg in mine]
            axes.plot(sizes, raw, linestyle="--", color=line.get_color(), label=f"{pattern}, raw")
        axes.set_xscale("log", base=2)
        _label(axes, title=way, x="block, KiB", y="GB/s")


def _ttft(figure: Figure, result: Result) -> None:
    """Seconds to the first token by prompt length; and the parts of a start after a kill."""
    left, right = figure.subplots(1, 2)
    rows = result["rows"]
    lengths = [row["prompt_tokens"] for row in rows]
    for key, name in _TIERS:
        points = [(tokens, row[key]) for tokens, row in zip(lengths, rows, strict=True) if row[key]]
        if points:
            left.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    left.plot(lengths, [row["load_bound_s"] for row in rows], linestyle=":", label="DRAM, bound")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    _label(left, title="first token", x="prompt tokens", y="seconds")
    kill = result.get("kill")  # none where it was stopped before
    parts = kill["parts"][::-1] if kill else []
    right.barh([part["doing"] for part in parts], [part["seconds"] for part in parts])
    _label(right, title="kill -9 → first token", x="seconds", y="")


def _decode(figure: Figure, result: Result) -> None:
    """Share of the roofline by batch, a line a context and who computed attention."""
    axes = figure.subplots()
    lines: dict[str, list[Result]] = {}
    for cell in result["cells"]:
        by = "" if cell.get("attention", "triton") == "triton" else f", {cell['attention']}"
        lines.setdefault(f"{cell['context_tokens']:,} tokens{by}", []).append(cell)
    for label, cells in lines.items():
        batches, shares = [cell["batch"] for cell in cells], [cell["share"] for cell in cells]
        axes.plot(batches, shares, marker="o", label=label)
        for cell in cells:
            axes.annotate(
                f"{cell['tokens_per_s']:,.0f}/s", (cell["batch"], cell["share"]), fontsize=7, va="bottom"
            )
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    _label(axes, title=f"decode, {result['model']}", x="batch", y="share of the roofline")


def _prefill(figure: Figure, result: Result) -> None:
    """Share of the rate of products by prompt length."""
    axes = figure.subplots()
    lengths = [row["prompt_tokens"] for row in result["rows"]]
    axes.plot(lengths, [row["share"] for row in result["rows"]], marker="o", label="all operations")
    for row in result["rows"]:
        axes.annotate(
            f"{row['tokens_per_s']:,.0f}/s", (row["prompt_tokens"], row["share"]), fontsize=7, va="bottom"
        )
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    _label(axes, title=f"prefill, {result['model']}", x="prompt tokens", y="share of the product rate")


def _pressure(figure: Figure, result: Result) -> None:
    """Times to the first token and hits of every cell."""
    times, hits = figure.subplots(1, 2, sharey=True)
    cells = [cell for cell in result["cells"] if "error" not in cell][::-1]
    names = [cell["cell"] for cell in cells]
    times.barh(names, [cell["ttft_p99_s"] for cell in cells], color="lightgray", label="p99")
    times.barh(names, [cell["ttft_p50_s"] for cell in cells], height=0.5, label="p50")
    _label(times, title="first token", x="seconds", y="")
    left = [0.0] * len(cells)
    for tier in ("hbm", "dram", "nvme"):
        rates = [cell["hit_rate_by_tier"][tier] for cell in cells]
        hits.barh(names, rates, left=left, label=tier)
        left = [start + rate for start, rate in zip(left, rates, strict=True)]
    lru = [cell["plain_lru_hit_rate"] for cell in cells]
    hits.plot(lru, names, linestyle="", marker="|", markersize=12, color="black", label="plain LRU")
    hits.set_xlim(0, 1)
    _label(hits, title="hits", x="share of the prompts' tokens", y="")


def _lookup(figure: Figure, result: Result) -> None:
    """Match and acquire, chained and in random order."""
    axes = figure.subplots()
    values = {
        f"{name} {blocks}{suffix}": milliseconds
        for suffix, found in (("", result), (", random", result["random"]))
        for name in ("match_ms", "call_ms")
        for blocks, milliseconds in found[name].items()
    }
    axes.barh([name.replace("_ms", "") for name in values][::-1], list(values.values())[::-1])
    _label(axes, title="match and acquire, p50", x="milliseconds", y="")


def _store(figure: Figure, result: Result) -> None:
    """Rates beside plain copies."""
    axes = figure.subplots()
    legs = result["legs"][::-1]
    names = [leg["leg"] for leg in legs]
    axes.barh(names, [leg["raw_gb_per_s"] for leg in legs], color="lightgray", label="plain")
    axes.barh(names, [leg["gb_per_s"] for leg in legs], height=0.5, label="ours")
    _label(axes, title="between the tiers", x="GB/s", y="")


def _interference(figure: Figure, result: Result) -> None:
    """Percent by which decode is slower, and the rate of stores beside it; a bar a slot size and rate."""
    left, right = figure.subplots(1, 2, sharey=True)
    cells = result["cells"][::-1]
    names = [f"{cell['slot_bytes'] // 1024:,} KiB, {cell['rate']}" for cell in cells]
    left.barh(names, [100 * cell["slowdown"] for cell in cells])
    right.barh(names, [cell["stored_gb_per_s"] for cell in cells])
    _label(left, title=f"{result['decode']}, batch {result['batch']}", x="slower by, %", y="")
    _label(right, title="stored meanwhile", x="GB/s", y="")


def _label(axes: Axes, *, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


_DRAWERS: Mapping[str, Callable[[Figure, Result], None]] = {
    "copy": _copy,
    "decode": _decode,
    "interference": _interference,
    "lookup": _lookup,
    "prefill": _prefill,
    "pressure": _pressure,
    "store": _store,
    "ttft": _ttft,
}
