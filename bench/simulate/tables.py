"""What the simulator found, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.simulate.advice import Advice
from bench.simulate.compare import Comparison
from bench.simulate.outcome import Latency, StoreOutcome
from kvstore.units import format_duration, format_size

__all__ = ["advice_table", "policies_table", "store_table"]


def policies_table(comparison: Comparison) -> Table:
    """Hit rates by policy and capacity, with their bounds; beside each the part of the gap to the optimum."""
    trace = comparison.trace
    table = Table(
        title=f"{trace.name}: {len(trace):,} requests, {trace.unique_blocks:,} blocks of {trace.block_tokens} tokens"
    )
    table.add_column("hit rate (gap closed)", no_wrap=True)
    for pct in comparison.capacities_pct:
        table.add_column(f"{pct:g} %", justify="right")
    table.add_row("lru, exact", *(f"{rate:.4f}" for rate in comparison.lru))
    for name in dict.fromkeys(row.policy for row in comparison.rows):
        rows = [row for row in comparison.rows if row.policy == name]
        table.add_row(name, *(_cell(row.hit_rate, row.gap_closed) for row in rows))
    table.add_row("optimum", *(f"{rate:.4f}" for rate in comparison.belady))
    table.add_row("infinite", *(f"{comparison.infinite:.4f}" for _ in comparison.capacities_pct))
    return table


def _cell(hit_rate: float, gap_closed: float | None) -> str:
    return f"{hit_rate:.4f}" if gap_closed is None else f"{hit_rate:.4f}\n({gap_closed:+.0%})"


def store_table(outcomes: Sequence[StoreOutcome]) -> Table:
    """The whole store, one column a policy."""
    first = outcomes[0]
    sizes = first.tiers
    table = Table(
        title=f"HBM {format_size(sizes.hbm)}, DRAM {format_size(sizes.dram)}, NVMe {format_size(sizes.nvme)}: "
        f"{first.requests:,} requests in {first.hours:.1f} simulated hours"
    )
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.policy, justify="right")
    table.add_row("hit rate", *(f"{outcome.hit_rate:.4f}" for outcome in outcomes))
    for tier in first.hit_rate_by_tier:
        table.add_row(
            f"  found in {tier}", *(f"{outcome.hit_rate_by_tier[tier]:.4f}" for outcome in outcomes)
        )
    for name in ("p50_s", "p90_s", "p99_s", "mean_s"):
        cells = (_times(outcome.ttft, outcome.ttft_without_store, name) for outcome in outcomes)
        table.add_row(f"first token, {name[:-2]} (without a store)", *cells)
    for way in first.moved_bytes:
        table.add_row(way.replace("_", " "), *(format_size(outcome.moved_bytes[way]) for outcome in outcomes))
    written = (format_size(int(outcome.flash_written_bytes_a_day)) for outcome in outcomes)
    table.add_row("flash writes a day", *written)
    for part in first.busy:
        table.add_row(
            f"busy: {part.replace('_', ' ')}", *(f"{outcome.busy[part]:.0%}" for outcome in outcomes)
        )
    if any(outcome.too_long for outcome in outcomes):
        table.add_row("prompts beyond HBM", *(f"{outcome.too_long:,}" for outcome in outcomes))
    return table


def _times(latency: Latency, without: Latency, name: str) -> str:
    mine, other = (format_duration(round(getattr(each, name), 3)) for each in (latency, without))
    return f"{mine} ({other})"


def advice_table(advice: Advice) -> Table:
    """What each size brings."""
    table = Table(
        title=f"KV of {advice.model}, LRU; all blocks together: {format_size(advice.working_set_bytes)}"
    )
    for name in (
        "size",
        "hit rate",
        "points by doubling",
        "points a GiB",
        "saved a prompt, DRAM",
        "from disk",
    ):
        table.add_column(name, justify="right")
    for row in advice.rows:
        table.add_row(
            format_size(row.size_bytes),
            f"{row.hit_rate:.1%}",
            f"{row.points_by_doubling:.1f}",
            f"{row.points_per_gib:.3f}",
            f"{row.saved_s_from_dram:.3f} s",
            f"{row.saved_s_from_disk:.3f} s",
        )
    return table
