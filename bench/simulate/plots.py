"""Curves of hit rate against capacity, with the optimum and an infinite cache, as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from bench.simulate.compare import Comparison
from bench.simulate.optimum import belady_hit_rate, next_requests
from kvstore.errors import ConfigError, MissingExtra
from kvstore.units import GIB

__all__ = ["check_plot", "draw_curves"]

_WIDTH_IN = 9.0
_HEIGHT_IN = 5.0
_CURVE_POINTS = 200
_OPTIMUM_POINTS = 16


def check_plot(path: Path | None) -> None:
    """Before hours of work. Raises: MissingExtra where nothing can be drawn, ConfigError where there is no folder."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib is needed and not installed: pip install 'kvstore[sim]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path.parent} is not a folder that exists")


def draw_curves(comparison: Comparison, path: Path, *, token_bytes: int | None = None) -> tuple[Path, Path]:
    """Draws `path` as `.png` and as `.svg`; with `token_bytes` the capacity is in GiB of that model's KV as well."""
    from matplotlib.figure import Figure

    trace = comparison.trace
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    unique = trace.unique_blocks
    low = min(min(comparison.capacities_pct), 1.0) / 2
    percents = np.geomspace(low, 100.0, _CURVE_POINTS)
    rates = [comparison.curve.hit_rate(percent * unique / 100) for percent in percents]
    axes.plot(percents, rates, color="black", label="lru, all sizes (stack distances)")
    axes.axhline(comparison.infinite, color="gray", linestyle=":", label="infinite cache")
    following = next_requests(trace)
    sizes = np.geomspace(low, 100.0, _OPTIMUM_POINTS)
    best = [belady_hit_rate(trace, max(1, int(percent * unique / 100)), following) for percent in sizes]
    axes.plot(sizes, best, color="gray", linestyle="--", label="Belady's optimum")
    for name in dict.fromkeys(row.policy for row in comparison.rows):
        rows = [row for row in comparison.rows if row.policy == name]
        axes.plot([row.capacity_pct for row in rows], [row.hit_rate for row in rows], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_title(f"{trace.name}: {len(trace):,} requests, {unique:,} blocks of {trace.block_tokens} tokens")
    axes.set_xlabel("capacity, % of the trace's unique blocks")
    axes.set_ylabel("hit rate")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    if token_bytes:
        gib = unique * trace.block_tokens * token_bytes / GIB / 100
        scales = (lambda pct: np.asarray(pct, float) * gib, lambda size: np.asarray(size, float) / gib)
        above = axes.secondary_xaxis("top", functions=scales)
        above.set_xlabel("GiB")
    files = path.with_suffix(".png"), path.with_suffix(".svg")
    figure.savefig(files[0], dpi=150)
    figure.savefig(files[1])
    return files
