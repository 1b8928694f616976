"""`decode`, `prefill` and `ttft` at tiny sizes on the CPU: everything is measured, and what is measured happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import decode, prefill, shapes, ttft
from bench.engine_figures import decode_figures, prefill_figures, ttft_figures
from bench.filled import FilledBlocks
from engine_adapter.base import Admission, RequestId
from kvstore.errors import ConfigError, KvstoreError


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets stay below the 107 bytes of a unix socket's path, also in a worker of a parallel run."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def silent(_: str) -> None: ...


def test_decode_measures_each_batch_at_each_context() -> None:
    plan = replace(decode.CPU, batches=(1, 3), contexts=(64, 128), steps=2)
    found = decode.measure(plan, silent, device="cpu")
    assert [(cell.batch, cell.context_tokens) for cell in found.cells] == [
        (1, 64),
        (3, 64),
        (1, 128),
        (3, 128),
    ]
    for cell in found.cells:
        assert cell.tokens_per_s == pytest.approx(cell.batch / cell.step_ms * 1e3)
        assert cell.share == pytest.approx(cell.roofline_ms / cell.step_ms)
        assert cell.requests_a_page == 1.0
    assert len(decode_figures(asdict(found))) == 9


@pytest.fixture
def other_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had two kinds of attention: its own computes both."""
    monkeypatch.setattr(shapes, "_check_attention", lambda *_: None)


@pytest.mark.usefixtures("other_attention")
def test_decode_by_flashinfer_is_measured_beside_our_own() -> None:
    plan = replace(decode.CPU, batches=(1, 2), contexts=(64,), steps=2)
    found = decode.measure(plan, silent, device="cpu", attention="flashinfer")
    assert [(cell.batch, cell.attention) for cell in found.cells] == [
        (1, "triton"),
        (1, "flashinfer"),
        (2, "triton"),
        (2, "flashinfer"),
    ]
    names = {figure.name for figure in decode_figures(asdict(found))}
    assert {
        "batch 2 at 64",
        "batch 2 at 64 by flashinfer",
        "batch 2 at 64 by flashinfer, of the roofline",
    } <= names


@pytest.mark.parametrize("measure, plan", [(decode.measure, decode.CPU), (prefill.measure, prefill.CPU)])
def test_no_figure_says_flashinfer_where_it_did_not_run(measure: Callable[..., object], plan: object) -> None:
    """The CPU's own attention was measured, and its figures said that they were FlashInfer's."""
    with pytest.raises(ConfigError, match="flashinfer needs a CUDA device"):
        measure(plan, silent, device="cpu", attention="flashinfer")


def test_a_step_in_which_not_all_decode_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that still prefill, or wait, would make a step look fast."""

    def admit(self: FilledBlocks, request: RequestId, num_tokens: int) -> Admission | None:
        return None if request.endswith("2") else whole(self, request, num_tokens)

    whole = FilledBlocks.admit
    monkeypatch.setattr(FilledBlocks, "admit", admit)
    plan = replace(decode.CPU, batches=(3,), contexts=(64,), steps=2)
    with pytest.raises(KvstoreError, match="3 requests gave 4 tokens in 2 steps"):
        decode.measure(plan, silent, device="cpu")


def test_prefill_measures_each_length() -> None:
    found = prefill.measure(replace(prefill.CPU, lengths=(64, 128), rounds=1), silent, device="cpu")
    assert [row.prompt_tokens for row in found.rows] == [64, 128]
    for row in found.rows:
        assert row.tokens_per_s == pytest.approx(row.prompt_tokens / row.seconds)
        assert row.share == pytest.approx(row.tflop_per_s / found.product_tflop_per_s)
    assert len(prefill_figures(asdict(found))) == 5


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_ttft_that_is_stopped_leaves_what_it_knew(short_path: Path) -> None:
    """A run that a time limit ended wrote nothing at all, and its log did not say how far it had come."""
    out, log = short_path / "ttft.json", short_path / "log"
    command = [sys.executable, "-m", "kvstore.cli.main", "bench", "ttft", "--device", "cpu", "--json"]
    with log.open("wb") as errors, (short_path / "printed").open("wb") as printed:
        process = subprocess.Popen([*command, "--out", str(out)], stdout=printed, stderr=errors)
        try:
            while not out.exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) != 0, "it had ended before"
        finally:
            process.kill()
            process.wait()
    result = json.loads(out.read_text())["results"]
    assert [row["prompt_tokens"] for row in result["rows"]][:1] == [256]
    assert result["rows"][0]["hbm_s"] > 0
    assert result["disk_error"] == "it was stopped before it had ended"
    assert f"{result['rows'][0]['prompt_tokens']} tokens: recompute" in log.read_text()
    assert len(ttft_figures(result)) > 2


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_ttft_finds_every_prompt_in_every_tier(short_path: Path) -> None:
    plan = replace(ttft.CPU, lengths=(128, 1024), samples=2, raw_bytes=1 << 20)
    found = ttft.measure(plan, silent, device="cpu", parent=short_path)
    if not all(all(row.samples.values()) for row in (*found.rows, *found.behind)):
        # On a busy machine DRAM may have no room in time for a block, and what lies behind it is no hit: once more.
        found = ttft.measure(plan, silent, device="cpu", parent=short_path)
    for row in found.rows:
        assert None not in (row.hbm_s, row.dram_s, row.disk_s)
        assert all(count > 0 for count in row.samples.values())
        assert row.equal, "a cached prompt was answered differently from tier to tier"
        assert row.load_bound_s > row.decode_step_s > 0
    (behind,) = found.behind
    assert (behind.prefix_tokens, behind.new_tokens, behind.load_bytes) == (1024, 128, 32 * (64 << 10))
    assert set(behind.samples) == {"grouped", "whole", "hbm"}
    assert all(count > 0 for count in behind.samples.values())
    assert behind.grouped_over_whole is not None
    kill = found.kill
    assert kill.cached_by_tier == {"hbm": 992}, "what was in HBM outlives the engine, all of it"
    assert sum(part.seconds for part in kill.parts) == pytest.approx(kill.total_s)
    assert min(part.seconds for part in kill.parts) >= 0
    doing = [part.doing for part in kill.parts]
    assert {"loading torch", "loading the weights", "the rest of attaching"} <= set(doing)
    assert doing[:2] == ["end of the killed process", "process start and imports"]
    assert doing[-1] == "first token"
    assert {"DRAM mapping", "HBM mapping", "HBM sample"} <= {part.doing for part in kill.beside}
    names = {figure.name for figure in ttft_figures(asdict(found))}
    assert {
        "128 recompute",
        "1,024 from hbm",
        "1,024 from dram",
        "1,024 from disk",
        "kill → first token",
        "1,024 from dram + 128 new, groups / whole",
    } <= names
    assert list(short_path.iterdir()) == [], "nothing is left on the disk"
