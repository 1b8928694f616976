"""From a request of the protocol to the engine, and from the engine's outputs to a result. Shared by every front."""

from __future__ import annotations

from engine_adapter.engine.engine import Output
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.tokenizer import TextTokenizer
from engine_adapter.serving.jsonl import GenerateRequest, Result

__all__ = ["Answer", "sampling_params", "tokenize"]


def tokenize(request: GenerateRequest, tokenizer: TextTokenizer) -> list[int]:
    """The prompt's tokens, whichever form it came in. Raises ModelError for messages without a chat template."""
    if request.token_ids is not None:
        return list(request.token_ids)
    if request.messages is not None:
        return tokenizer.encode_chat(
            [{"role": turn.role, "content": turn.content} for turn in request.messages]
        )
    return tokenizer.encode(request.prompt or "")


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """How the engine is to choose. Raises InvalidRequest for what is out of range."""
    return SamplingParams(
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )


class Answer:
    """Collects the outputs of one request. Times are `time.perf_counter()`."""

    __slots__ = ("_accepted_at", "_first_at", "_prompt_tokens", "_text", "_token_ids")

    def __init__(self, *, accepted_at: float, prompt_tokens: int) -> None:
        self._accepted_at = accepted_at
        self._prompt_tokens = prompt_tokens
        self._first_at: float | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []

    def add(self, output: Output, now: float) -> Result | None:
        """Takes one output; the result when it is the last. Raises what the request failed with."""
        if output.error is not None:
            raise output.error
        if self._first_at is None and output.token_ids:
            self._first_at = now
        self._text.append(output.text)
        self._token_ids += output.token_ids
        if output.finish is None or output.stats is None:
            return None
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=output.finish.value,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=output.stats.cached_tokens,
            cached_by_tier=dict(output.stats.cached_by_tier),
            ttft_s=None if self._first_at is None else self._first_at - self._accepted_at,
            tokens_per_s=output.stats.tokens_per_s,
        )
