"""The connector beside the class that it fills in, of whichever vLLM is there: each new hook is to be decided on."""

from __future__ import annotations

import json
import subprocess

from tests.vllm.processes import PYTHON, ROOT

INHERITED = {
    # vLLM's own bookkeeping of the step's metadata, and what the object is.
    "bind_connector_metadata",
    "clear_connector_metadata",
    "has_connector_metadata",
    "role",
    # Deprecated names of `get_transfer_results`; counts and statistics of which there are none.
    "get_finished",
    "get_finished_count",
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    # Events come from the process that schedules (`take_events`), not from the ranks.
    "get_kv_connector_kv_cache_events",
    # vLLM's block pool and its manager are not looked into; its memory is not ours (docs/vllm.md says why).
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "get_mem_pool_context",
    "has_pending_block_frees",
    # No hook of a layer, no staging in host memory, nothing in captured graphs.
    "finish_forward",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "set_host_xfer_buffer_ops",
    # Every group is loaded, by whole blocks, as far as all groups have them.
    "get_loaded_kv_cache_group_ids",
    "register_finished_partial_tail",
    "supports_divergent_local_hybrid_hits",
    # vLLM 0.33: True, since `unregister_kv_caches` ends all copies.
    "supports_sleep_mode",
}
OF_0_33 = {"restore_kv_caches", "unregister_kv_caches"}
"""Ours, of which 0.32 knows nothing."""


def test_every_hook_is_filled_in_or_inherited_on_purpose() -> None:
    run = subprocess.run(
        [str(PYTHON), "-m", "tests.vllm.contract"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["abstract"] == []
    hooks = said["hooks"]
    assert {name for name, hook in hooks.items() if not hook["own"]} - INHERITED == set()
    assert INHERITED - set(hooks) <= {"supports_sleep_mode"}
    for name, hook in hooks.items():
        if hook["own"]:
            assert hook["ours"] == hook["theirs"], name
    assert set(hooks) >= OF_0_33 or not OF_0_33 & set(hooks)
