"""Runs steps on a GPU without waiting for them: decode steps as captured graphs, all others kernel by kernel.

What a step chose stays on the device, where the next step reads it; the host learns of it later. The same code runs on
the CPU with the twins of its parts. One thread; a step's pages may be committed once `wait` of it has returned.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.arriving import LateKv, pass_over
from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.graphs import graph_sizes, padded_size
from engine_adapter.engine.models.fused import FusedLlama
from engine_adapter.engine.passes import Passes
from engine_adapter.engine.request import UNKNOWN, Chunk, Request
from engine_adapter.engine.runner import LaunchedStep
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.step_buffers import Staging, StepBuffers
from engine_adapter.engine.streams import Queue

__all__ = ["CudaRunner"]


class _Launched:
    """See LaunchedStep."""

    def __init__(self, staging: Staging, count: int, logits: Tensor) -> None:
        self._staging = staging
        self._event = staging.event
        self._count = count
        self._logits = logits

    def wait(self) -> None:
        """See LaunchedStep."""
        if self._event is not None:
            self._event.synchronize()

    def tokens(self) -> list[int]:
        """See LaunchedStep."""
        tokens: list[int] = self._staging.chosen[: self._count].tolist()
        return tokens

    def logits(self) -> Tensor:
        """See LaunchedStep."""
        return self._logits


class CudaRunner:
    """See the module and `Runner`."""

    def __init__(
        self,
        model: FusedLlama,
        passes: Passes,
        queue: Queue,
        settings: EngineSettings,
        *,
        max_pages: int,
        agree: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`max_pages`: most pages of one sequence. `agree` makes chosen tokens the same on all shards of a model."""
        self._agree = agree
        self._model = model
        self._passes = passes
        self._queue = queue
        self._device = torch.device(settings.device)
        self._chunk_tokens = settings.chunk_tokens
        self._sizes = graph_sizes(settings.max_running)
        shape = (settings.max_running, model.config.vocab_size)
        with queue.current():  # so that what fills them stands before the first step
            self._buffers = StepBuffers(
                queue,
                self._device,
                max_running=settings.max_running,
                max_pages=max_pages,
                depth=settings.overlap,
            )
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._chosen_by: dict[Request, int] = {}  # of the last launch: where in `chosen` a request's token is

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all graphs, the largest first, and rehearse chunks, so that no request waits for it."""
        with self._queue.current():
            for num_rows in (self._chunk_tokens, 2):
                token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
                self._model.logits(token_ids, self._passes.rehearsal(num_rows), token_ids[:1])
            for size in reversed(self._sizes):
                self._graph(size)
            self._buffers.rehearse()
            self._queue.record().synchronize()

    def drop_graphs(self) -> None:
        """Let captured graphs go. No step may be in flight; the next one captures what it needs."""
        self._graphs.clear()

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        """See Runner."""
        with self._queue.current():
            staging = self._buffers.next_staging()
            sampling = [chunk for chunk in chunks if chunk.samples]
            try:
                logits = (self._decode if _in_a_graph(chunks) else self._mixed)(staging, chunks, tables)
            except LateKv:
                self._queue.record().synchronize()  # its pages may go back
                raise
            self._buffers.fetch_chosen(staging, len(sampling))
            staging.event = self._queue.record()
        self._chosen_by = {chunk.request: index for index, chunk in enumerate(sampling)}
        return _Launched(staging, len(sampling), logits)

    def _decode(
        self, staging: Staging, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]
    ) -> Tensor:
        size = padded_size(self._sizes, len(chunks))
        replay = self._graph(size)
        self._fill_decode(staging, chunks, size)
        self._buffers.send_rows(staging)
        versions: list[object] = [
            (chunk.request, chunk.request.num_preemptions, len(table))
            for chunk, table in zip(chunks, tables, strict=True)
        ]
        self._buffers.send_tables(staging, list(tables), versions)
        self._passes.plan_decode(staging.contexts(size))
        replay()
        return self._logits[: len(chunks)]

    def _fill_decode(self, staging: Staging, chunks: Sequence[Chunk], size: int) -> None:
        tokens, sources, contexts, sequences, positions = staging.rows.numpy()
        count = len(chunks)
        last = [chunk.request.tokens[chunk.start] for chunk in chunks]
        tokens[:count] = last
        sources[:count] = [
            self._chosen_by[chunk.request] if token == UNKNOWN else -1
            for chunk, token in zip(chunks, last, strict=True)
        ]
        contexts[:count] = [chunk.end for chunk in chunks]
        sequences[:count] = np.arange(count)
        positions[:count] = contexts[:count] - 1
        tokens[count:size], sources[count:size] = 0, -1
        contexts[count:size], sequences[count:size], positions[count:size] = 0, -1, 0

    def _graph(self, size: int) -> Callable[[], None]:
        """What queues a decode step of `size` rows; captured at its first use, over padding rows alone."""
        if size not in self._graphs:
            chosen = self._buffers.chosen.clone()  # of the step before: the capture's runs write there
            self._buffers.clear_rows()
            self._passes.plan_decode(np.zeros(size, np.int32))
            self._graphs[size] = self._queue.capture(lambda: self._decode_body(size))
            self._buffers.chosen.copy_(chosen)
        return self._graphs[size]

    def _decode_body(self, size: int) -> None:
        b = self._buffers
        sources = b.sources[:size]
        chosen = b.chosen.index_select(0, sources.clamp(min=0))
        token_ids = torch.where(sources >= 0, chosen, b.token_ids[:size])
        logits = self._model.logits(token_ids, self._passes.decode(b.decode.first(size)), None)
        torch.add(
            logits, 0.0, out=self._logits[:size]
        )  # not `copy_`: that may take a copy engine, as stores do
        self._choose(logits)

    def _mixed(
        self,
        staging: Staging,  # noqa: ARG002 (as `_decode`)
        chunks: Sequence[Chunk],
        tables: Sequence[NDArray[np.int32]],
    ) -> Tensor:
        lengths = np.array([chunk.end - chunk.start for chunk in chunks])
        ends = np.cumsum(lengths)
        batch = AttentionBatch(
            num_rows=int(ends[-1]),
            block_tables=_pad_tables(tables),
            rows=np.stack((ends - lengths, ends), axis=1).astype(np.int32),
            context_lens=np.array([chunk.end for chunk in chunks], np.int32),
        )
        token_ids = np.concatenate([np.array(c.request.tokens[c.start : c.end], np.int64) for c in chunks])
        wanted = np.array([end - 1 for end, c in zip(ends, chunks, strict=True) if c.samples], np.int64)
        unknown = np.flatnonzero(token_ids == UNKNOWN)
        owners = np.searchsorted(ends, unknown, side="right")
        sources = np.array([self._chosen_by[chunks[i].request] for i in owners], np.int64)
        parts = self._upload(token_ids, wanted, unknown, sources)
        ids = parts[0]
        if len(unknown):
            ids[parts[2]] = self._buffers.chosen[parts[3]].long()
        logits = self._model.logits(ids, pass_over(chunks, self._passes.mixed(batch)), parts[1])
        if len(wanted):
            self._choose(logits)
        return logits

    def _choose(self, logits: Tensor) -> None:
        """The most likely token of each row, for the host and for the step after this one."""
        chosen = self._buffers.chosen[: len(logits)]
        chosen.copy_(logits.argmax(dim=-1))
        if self._agree is not None:
            self._agree(chosen)

    def _upload(self, *parts: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """One copy of all of them. Their staging is torch's own, which it does not reuse before the copy is done."""
        flat = torch.from_numpy(np.concatenate(parts))
        if self._device.type == "cuda":
            flat = flat.pin_memory()
        there = flat.to(self._device, non_blocking=True)
        return tuple(torch.split(there, [len(part) for part in parts]))


def _in_a_graph(chunks: Sequence[Chunk]) -> bool:
    """Whether all of them decode one token, over KV that is there: a graph waits for nothing."""
    return all(
        chunk.samples and chunk.end - chunk.start == 1 and chunk.request.arriving is None for chunk in chunks
    )


def _pad_tables(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
