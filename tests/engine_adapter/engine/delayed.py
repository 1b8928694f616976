"""A runner whose steps compute nothing before somebody waits for them: a GPU that is as slow as it may be."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.request import UNKNOWN, Chunk, Request
from engine_adapter.engine.runner import FlatRunner
from engine_adapter.engine.settings import EngineSettings


class DelayedStep:
    def __init__(
        self, runner: "DelayedRunner", chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]
    ) -> None:
        self.runner = runner
        self.chunks = list(chunks)
        self.tables = [table.copy() for table in tables]
        self.tokens_then = [list(chunk.request.tokens[: chunk.end]) for chunk in chunks]
        self.result: Tensor | None = None

    def compute(self) -> None:
        shadows = []
        for chunk, tokens in zip(self.chunks, self.tokens_then, strict=True):
            if tokens[-1] == UNKNOWN:
                tokens[-1] = self.runner.chosen[chunk.request]
            assert UNKNOWN not in tokens
            more = [] if chunk.samples else [0]
            shadow = Request(
                id=chunk.request.id, tokens=[*tokens, *more], num_prompt=chunk.request.num_prompt
            )
            shadows.append(Chunk(request=shadow, start=chunk.start, end=chunk.end))
        self.result = self.runner.inner.run(shadows, self.tables)
        sampling = [chunk.request for chunk in self.chunks if chunk.samples]
        self.runner.chosen = dict(zip(sampling, self.result.argmax(dim=-1).tolist(), strict=True))

    def wait(self) -> None:
        while self.result is None:
            self.runner.in_flight.popleft().compute()

    def tokens(self) -> list[int]:
        assert self.result is not None, "nobody waited"
        tokens: list[int] = self.result.argmax(dim=-1).tolist()
        return tokens

    def logits(self) -> Tensor:
        assert self.result is not None, "nobody waited"
        return self.result


class DelayedRunner:
    """`in_flight` are launched steps that have computed nothing; `most_in_flight` the most there were."""

    def __init__(self, loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> None:
        self.inner = FlatRunner(loaded.model, SdpaAttention(pool))
        self.in_flight: deque[DelayedStep] = deque()
        self.most_in_flight = 0
        self.chosen: dict[Request, int] = {}

    def prepare(self) -> None:
        pass

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> DelayedStep:
        step = DelayedStep(self, chunks, tables)
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return step
