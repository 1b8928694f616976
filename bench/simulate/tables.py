"""What the simulator found, as tables."""

from __future__ import annotations

from rich.table import Table

from bench.simulate.compare import Comparison

__all__ = ["policies_table"]


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
