"""Drives a model below the scheduler: passes of chosen shape over a pool with shuffled pages full of NaN."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine_adapter.base import RequestId
from engine_adapter.engine.attention.base import AttentionBackend, AttentionBatch
from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.attention.tiled import TiledAttention
from engine_adapter.engine.kv_pool import view_pages
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.request import Chunk, Request
from engine_adapter.engine.runner import FlatRunner, Runner, TiledRunner
from tests.support.pages import pages_of


class Sequences:
    """Token lists with block tables of their own; `prefix_of` lets one share the leading pages of another."""

    def __init__(self, model: Llama, *, block_tokens: int = 16, num_pages: int = 128, seed: int = 0) -> None:
        page_bytes = model.config.page_bytes(block_tokens, model.dtype.itemsize)
        memory = np.full((num_pages, page_bytes), 0xFF, np.uint8)
        self.model = model
        self.block_tokens = block_tokens
        self.pool = view_pages(pages_of(memory), model.config, block_tokens, model.dtype)
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.requests: list[Request] = []
        self.tables: list[np.ndarray] = []

    def add(self, tokens: Sequence[int], cached: int = 0, prefix_of: int = 0) -> int:
        """A sequence whose first `cached` tokens lie in the pages of sequence `prefix_of`."""
        assert cached % self.block_tokens == 0
        total = -(-len(tokens) // self.block_tokens)
        shared = self.tables[prefix_of][: cached // self.block_tokens].tolist() if cached else []
        own = [self._free.pop() for _ in range(total - len(shared))]
        index = len(self.requests)
        request = Request(
            id=RequestId(str(index)), tokens=list(tokens), num_prompt=len(tokens), num_computed=cached
        )
        self.requests.append(request)
        self.tables.append(np.array(shared + own, np.int32))
        return index

    def forward(self, backend: AttentionBackend, work: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Compute up to token `end` of each (sequence, end); logits of all rows computed, per sequence."""
        starts = [self.requests[i].num_computed for i, _ in work]
        lengths = [end - start for (_, end), start in zip(work, starts, strict=True)]
        ends = np.cumsum(lengths)
        rows = np.stack((ends - lengths, ends), axis=1).astype(np.int32)
        width = max(len(self.tables[i]) for i, _ in work)
        tables = np.stack([np.pad(self.tables[i], (0, width - len(self.tables[i]))) for i, _ in work])
        contexts = np.array([end for _, end in work], np.int32)
        batch = AttentionBatch(num_rows=int(ends[-1]), block_tables=tables, rows=rows, context_lens=contexts)
        flat = [
            t
            for (i, end), start in zip(work, starts, strict=True)
            for t in self.requests[i].tokens[start:end]
        ]
        hidden = self.model.forward(
            torch.tensor(flat), torch.from_numpy(batch.positions()), backend.plan(batch)
        )
        for i, end in work:
            self.requests[i].num_computed = end
        return list(self.model.logits(hidden).split(lengths))

    def run(self, runner: Runner, work: Sequence[tuple[int, int]]) -> Tensor:
        """The same through a runner: logits of each sequence whose tokens are all computed now."""
        chunks = [
            Chunk(request=self.requests[i], start=self.requests[i].num_computed, end=end) for i, end in work
        ]
        logits = runner.run(chunks, [self.tables[i] for i, _ in work])
        for i, end in work:
            self.requests[i].num_computed = end
        return logits

    def flat(self) -> FlatRunner:
        return FlatRunner(self.model, SdpaAttention(self.pool))

    def tiled(self) -> TiledRunner:
        return TiledRunner(self.model, TiledAttention(self.pool))


def random_tokens(length: int, seed: int, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
