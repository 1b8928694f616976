"""A vLLM of its own process, told what to do by JSON lines: `python -m tests.vllm.driver OPTIONS`, a JSON object.

    {"do": "generate", "prompts": [[token, …], …], "max_tokens": n, "salts": […], "loras": [[name, id, folder], …]}
        → [{"tokens": […], "logprobs": […], "cached": n, "finish": "…"}, …], each log-probability exact (as hex)
    {"do": "reset"}     forgets vLLM's own prefix cache
    {"do": "call", "name": "…", "arguments": […]}     a function of tests.vllm.inside, in this process
    {"do": "end"}

The engine runs in this process, so that faults can be put in where they belong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",  # log-probabilities would need a C++ compiler
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.lora.request import LoRARequest


class Driver:
    """One engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        connector = options.pop("connector", None)
        policy = options.pop("policy", "recompute")
        if options.pop("events", False):
            options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        transfer = None
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector="KvstoreConnector",
                kv_connector_module_path="engine_adapter.vllm",
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config=connector,
            )
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 1024,
            "disable_log_stats": False,
        }
        self.llm = LLM(**{**defaults, **options}, kv_transfer_config=transfer)
        self.sampling = SamplingParams

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    def generate(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Greedy, all prompts at once."""
        prompts = [{"prompt_token_ids": tokens} for tokens in said["prompts"]]
        for prompt, salt in zip(prompts, said.get("salts", []), strict=False):
            if salt is not None:
                prompt["cache_salt"] = salt
        params = SamplingParams(
            temperature=0.0, max_tokens=said.get("max_tokens", 8), logprobs=2, ignore_eos=True
        )
        loras = [LoRARequest(*one) if one else None for one in said.get("loras", [])] or None
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        took = time.perf_counter() - began
        return [self._shown(output, took) for output in outputs]

    def drain(self) -> None:
        """Steps until nothing of the connector's is under way: in this process nobody else does."""
        until = time.monotonic() + 120
        while time.monotonic() < until and self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def _shown(self, output: Any, took: float) -> dict[str, Any]:
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        logprobs, gaps = [], []
        for token, found in zip(tokens, answer.logprobs or [], strict=False):
            logprobs.append(found[token].logprob.hex())
            best = sorted((entry.logprob for entry in found.values()), reverse=True)
            gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
        metrics = output.metrics
        ttft = getattr(metrics, "first_token_latency", None) if metrics is not None else None
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "gaps": gaps,
            "cached": output.num_cached_tokens,
            "finish": answer.finish_reason,
            "took_s": took,
            "ttft_s": ttft,
        }

    def handle(self, said: dict[str, Any]) -> Any:
        """One line."""
        match said["do"]:
            case "generate":
                found = self.generate(said)
                self.drain()
                return found
            case "reset":
                return self.llm.reset_prefix_cache(reset_connector=said.get("connector", False))
            case "call":
                from tests.vllm import inside

                return getattr(inside, said["name"])(self, *said.get("arguments", []))
        raise ValueError(f"unknown: {said}")


def main() -> None:
    """Answers on the descriptor that was standard output; what vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        if said["do"] == "end":
            break
        try:
            answer = {"value": driver.handle(said)}
        except Exception as error:  # noqa: BLE001 (a process's boundary: the test shows it)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    driver.core.shutdown()


if __name__ == "__main__":
    main()
