"""The lines of the tables of `ttft`, `decode`, `prefill` and `pressure`, with what must be reached on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report import Figure

__all__ = ["decode_figures", "prefill_figures", "pressure_figures", "ttft_figures"]

_DECODE_SHARE = 0.80  # at batch 32, 4,096 tokens
_PREFILL_SHARE = 0.60  # at 8,192 tokens


def _on_gpu(result: Mapping[str, Any]) -> bool:
    """Bounds are stated for a GPU; a CPU only shows that a benchmark runs."""
    return str(result["device"]).startswith("cuda")


def decode_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Tokens a second and the share of the roofline, for each batch and context; stored ones may not say by whom."""
    figures = [
        Figure(name="reads", value=result["read_gb_per_s"], unit="GB/s", larger_is_better=True),
    ]
    for cell in result["cells"]:
        name = f"batch {cell['batch']} at {cell['context_tokens']:,}"
        ours = cell.get("attention", "triton") == "triton"
        name = name if ours else f"{name} by {cell['attention']}"
        stated = _on_gpu(result) and ours and (cell["batch"], cell["context_tokens"]) == (32, 4096)
        figures += [
            Figure(name=name, value=cell["tokens_per_s"], unit="tokens/s", larger_is_better=True),
            Figure(
                name=f"{name}, of the roofline",
                value=cell["share"],
                unit="",
                bound=_DECODE_SHARE if stated else None,
                larger_is_better=True,
            ),
        ]
    return figures


def prefill_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Tokens a second and the share of the rate of products, for each length."""
    figures = [
        Figure(
            name="matrix products", value=result["product_tflop_per_s"], unit="TFLOP/s", larger_is_better=True
        ),
    ]
    for row in result["rows"]:
        name = f"{row['prompt_tokens']:,} tokens"
        stated = _on_gpu(result) and row["prompt_tokens"] == 8192
        figures += [
            Figure(name=name, value=row["tokens_per_s"], unit="tokens/s", larger_is_better=True),
            Figure(
                name=f"{name}, of the products",
                value=row["share"],
                unit="",
                bound=_PREFILL_SHARE if stated else None,
                larger_is_better=True,
            ),
        ]
    return figures


def _behind_figures(row: Mapping[str, Any]) -> list[Figure]:
    """Of new tokens behind a prefix from DRAM."""
    name = f"{row['prefix_tokens']:,} from dram + {row['new_tokens']:,} new"
    ways = (("in layer groups", "grouped_s"), ("whole load first", "whole_s"), ("prefix in hbm", "hbm_s"))
    figures = [
        Figure(name=f"{name}, {way}", value=row[key], unit="s") for way, key in ways if row[key] is not None
    ]
    if row["grouped_over_whole"] is not None:
        figures.append(Figure(name=f"{name}, groups / whole", value=row["grouped_over_whole"], unit=""))
    return figures


def ttft_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Seconds to the first token by tier, and the parts of a start after a kill."""
    figures = [
        Figure(name="plain pinned copy", value=result["raw_gb_per_s"], unit="GB/s", larger_is_better=True)
    ]
    for row in result["rows"]:
        tokens = f"{row['prompt_tokens']:,}"
        figures.append(Figure(name=f"{tokens} recompute", value=row["recompute_s"], unit="s"))
        for tier in ("hbm", "dram", "disk"):
            if row[f"{tier}_s"] is not None:
                bound = row["load_bound_s"] if tier == "dram" and _on_gpu(result) else None
                figures.append(
                    Figure(name=f"{tokens} from {tier}", value=row[f"{tier}_s"], unit="s", bound=bound)
                )
        if row["recompute_over_dram"] is not None:
            name = f"{tokens} recompute / dram"
            figures.append(
                Figure(name=name, value=row["recompute_over_dram"], unit="", larger_is_better=True)
            )
    for row in result.get("behind", ()):
        figures += _behind_figures(row)
    kill = result.get("kill")
    if kill is None:  # it was stopped before
        return figures
    figures += [
        Figure(name=f"kill: {part['doing']}", value=part["seconds"], unit="s") for part in kill["parts"]
    ]
    figures += [
        Figure(name=f"kill, meanwhile: {part['doing']}", value=part["seconds"], unit="s")
        for part in kill.get("beside", ())
    ]
    figures += [
        Figure(name="kill → first token", value=kill["total_s"], unit="s"),
        Figure(name="kill: KV in the first token", value=kill["kv_s"], unit="s"),
    ]
    return figures


def _last_round(cell: Mapping[str, Any]) -> list[Figure]:
    """Where documents are visited in a round, and more than once."""
    by_round = cell.get("hit_rate_by_round", ())
    if len(by_round) < 2:
        return []
    name = f"{cell['cell']} hits, last round"
    return [Figure(name=name, value=by_round[-1], unit="", larger_is_better=True)]


def pressure_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Each cell's times, rate and hits; a cell that failed has none."""
    figures = []
    for cell in result["cells"]:
        name = cell["cell"]
        if "error" in cell:
            continue
        figures += [
            Figure(name=f"{name} TTFT p50", value=cell["ttft_p50_s"], unit="s"),
            Figure(name=f"{name} TTFT p99", value=cell["ttft_p99_s"], unit="s"),
            Figure(
                name=f"{name} answers", value=cell["tokens_per_s"], unit="tokens/s", larger_is_better=True
            ),
            Figure(name=f"{name} hits", value=cell["hit_rate"], unit="", larger_is_better=True),
            *_last_round(cell),
            Figure(
                name=f"{name} hits of a plain LRU",
                value=cell["plain_lru_hit_rate"],
                unit="",
                larger_is_better=True,
            ),
        ]
    return figures
