"""Plots of results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench.machine import document
from bench.plots import draw_folder

LEG = {"gb_per_s": 50.0, "raw_gb_per_s": 55.0}
RESULTS = {
    "copy": {
        "legs": [
            {"way": way, "pattern": "scattered", "block_bytes": size, **LEG}
            for way in ("load", "store", "both")
            for size in (1 << 16, 1 << 22)
        ]
    },
    "decode": {
        "model": "m",
        "cells": [
            {"batch": batch, "context_tokens": 4096, "share": 0.8, "tokens_per_s": 100.0} for batch in (1, 32)
        ],
    },
    "lookup": {
        "match_ms": {"1024": 0.2},
        "call_ms": {"1024": 1.0},
        "random": {"match_ms": {"1024": 0.4}, "call_ms": {"1024": 2.0}},
    },
    "prefill": {"model": "m", "rows": [{"prompt_tokens": 8192, "share": 0.6, "tokens_per_s": 30_000.0}]},
    "pressure": {
        "cells": [
            {
                "cell": "2/zipf/dram",
                "ttft_p50_s": 0.1,
                "ttft_p99_s": 0.3,
                "hit_rate_by_tier": {"hbm": 0.3, "dram": 0.6, "nvme": 0.0},
                "plain_lru_hit_rate": 0.5,
            },
            {"cell": "2/zipf/disk", "error": "no disk"},
        ]
    },
    "store": {"legs": [{"leg": "hbm_to_dram", **LEG}]},
    "ttft": {
        "rows": [
            {
                "prompt_tokens": tokens,
                "recompute_s": 1.0,
                "hbm_s": 0.01,
                "dram_s": 0.05,
                "disk_s": None,
                "load_bound_s": 0.06,
            }
            for tokens in (8192, 32768)
        ],
        "kill": {
            "parts": [
                {"doing": "process start and imports", "seconds": 1.0},
                {"doing": "first token", "seconds": 0.02},
            ]
        },
    },
}


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert draw_folder(tmp_path) is None


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_every_result_is_drawn(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps(document(RESULTS[name])))
    assert draw_folder(tmp_path) == [tmp_path / f"{name}.png"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
