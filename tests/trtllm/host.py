"""A host that calls the connector as TensorRT-LLM's executor does, with memory writes in place of kernels.

Each iteration, as in its executor loop and connector manager: allocate (one lookup a request, then the pages), requests
that load in the background leave the batch, plan, bind on every rank, loads, the forward pass with its layer hooks,
saves, finished requests, then what all ranks say has ended. A page holds a function of the tokens up to each position,
and whatever is read is checked against it. Pages that are given back are overwritten at once.
"""

from __future__ import annotations

import copy
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.trtllm import interface
from tests.trtllm.interface import RequestData, SchedulerOutput

__all__ = ["BLOCK_TOKENS", "Host", "Request", "arguments"]

BLOCK_TOKENS, LAYERS, DIM = 4, 2, 24
_GARBAGE = -7.0


@dataclass
class Request:
    """As the connector sees it, and what the host knows of it."""

    request_id: int
    tokens: list[int]
    new_tokens: int = 1  # to generate
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    blocks: list[int] = field(default_factory=list)
    prompt: int = 0
    computed: int = 0  # tokens whose KV is in its pages
    matched: int = 0
    state: str = "new"
    generated: int = 0
    said_tokens: int = 0
    said_blocks: int = 0
    appeared: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


def arguments(folder: str, **changes: object) -> Any:
    """TensorRT-LLM's arguments, as far as they matter."""
    cache = SimpleNamespace(tokens_per_block=BLOCK_TOKENS, dtype="auto")
    base = {"model": folder, "kv_cache_config": cache, "speculative_config": None, "attn_backend": "TRTLLM"}
    return SimpleNamespace(**{**base, **changes})


class Host:
    """One engine of `world` ranks, all in this process."""

    def __init__(self, args: Any, *, world: int = 1, blocks: int = 64, chunk_tokens: int = 1 << 20) -> None:
        from engine_adapter.trtllm import KvstoreScheduler, KvstoreWorker

        self.world = world
        self.chunk_tokens = chunk_tokens
        self.pools = [torch.full((blocks, LAYERS, 2, BLOCK_TOKENS * DIM), _GARBAGE) for _ in range(world)]
        self.scheduler = KvstoreScheduler(args)
        self.workers: list[KvstoreWorker] = []
        for rank in range(world):
            interface.RANK.set(rank)
            interface.WORLD.set(world)
            worker = KvstoreWorker(args)
            worker.register_kv_caches(self.pools[rank])
            self.workers.append(worker)
        self.free = list(range(blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self.ended: list[set[int]] = [set() for _ in range(world)]  # said by each rank, not by all yet
        self.new_loading: list[int] = []
        self.new_saving: list[int] = []
        self.requeued: set[int] = set()
        self._ids = iter(range(1, 1 << 30))

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    # ------------------------------------------------------------ requests

    def add(self, tokens: Sequence[int], **options: Any) -> Request:
        request = Request(next(self._ids), list(tokens), prompt=len(tokens), **options)
        self.waiting.append(request)
        return request

    def run(self, tokens: Sequence[int], **options: Any) -> Request:
        """To its end; `matched` says how many tokens were loaded."""
        request = self.add(tokens, **options)
        for _ in range(20_000):
            self.iterate()
            if request.state == "done":
                return request
        raise AssertionError(f"{request} does not end")

    def settle(self) -> None:
        """Until nothing is being saved."""
        for _ in range(20_000):
            if not (self.saving or self.new_saving):
                return
            self.iterate()
        raise AssertionError("a save does not end")

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.state = "done"
            return
        if request in self.running:
            self.running.remove(request)
        self._finish(request)

    def preempt(self, request: Request) -> None:
        """Its pages are taken, and it waits again with all its tokens."""
        self.running.remove(request)
        self.requeued.add(request.request_id)
        self._finish(request)

    # ------------------------------------------------------------ an iteration

    def iterate(self) -> None:
        self._allocate()
        batch = [request for request in self.running if request.request_id not in self.loading]
        metadata = self.scheduler.build_connector_meta(self._output(batch))
        for worker in self.workers:
            worker.bind_connector_meta(copy.deepcopy(metadata))
            worker.start_load_kv(None)
        if batch:
            self._forward(batch)
            for worker in self.workers:
                worker.wait_for_save(None)
            self._sample(batch)
        self._poll()

    def _allocate(self) -> None:
        for request in list(self.waiting):
            needed = -(-(len(request.tokens) + request.new_tokens) // BLOCK_TOKENS)
            if needed > len(self.free):
                continue
            self.waiting.remove(request)
            request.matched, in_background = self.scheduler.get_num_new_matched_tokens(request, 0)
            assert in_background == (request.matched > 0)
            assert request.matched < len(request.tokens)
            request.blocks = [self.free.pop() for _ in range(needed)]
            request.computed = request.matched
            request.said_tokens = request.said_blocks = 0
            request.appeared = False
            self.scheduler.update_state_after_alloc(request, list(request.blocks))
            request.state = "running"
            self.running.append(request)
            if in_background:
                self.loading[request.request_id] = request
                self.new_loading.append(request.request_id)

    def _output(self, batch: list[Request]) -> SchedulerOutput:
        output = SchedulerOutput()
        for request in batch:
            if request.generated and request.computed >= len(request.tokens) - 1:
                scheduled = 1
            else:
                scheduled = min(len(request.tokens) - request.computed, self.chunk_tokens)
            data = RequestData(
                request.request_id,
                request.tokens[request.said_tokens :],
                request.blocks[request.said_blocks :],
                request.computed,
                scheduled,
            )
            request.said_tokens, request.said_blocks = len(request.tokens), len(request.blocks)
            (output.cached_requests if request.appeared else output.new_requests).append(data)
            request.appeared = True
        return output

    def _forward(self, batch: list[Request]) -> None:
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.wait_for_layer_load(layer, None)
                worker.save_kv_layer(layer, None)
        for request in batch:
            self.check(request)
            end = min(request.computed + self.chunk_tokens, len(request.tokens))
            for position in range(request.computed, end):
                for rank in range(self.world):
                    self._place(request, rank, position)[:] = expected(request, rank, position)
            request.computed = end

    def check(self, request: Request) -> None:
        """Everything that the request takes as computed."""
        for position in range(request.computed):
            for rank in range(self.world):
                got = self._place(request, rank, position)
                assert torch.equal(got, expected(request, rank, position)), (request, rank, position)

    def _place(self, request: Request, rank: int, position: int) -> torch.Tensor:
        """[layers, 2, dim], shared."""
        page = self.pools[rank][request.blocks[position // BLOCK_TOKENS]]
        return page.view(LAYERS, 2, BLOCK_TOKENS, DIM)[:, :, position % BLOCK_TOKENS]

    def _sample(self, batch: list[Request]) -> None:
        for request in batch:
            if request.computed < len(request.tokens):
                continue  # a chunk of its prompt
            if request.generated >= request.new_tokens:
                self.running.remove(request)
                self._finish(request)
            else:
                request.tokens.append(1000 + request.generated)
                request.generated += 1

    def _finish(self, request: Request) -> None:
        request.state = "ended"
        if self.scheduler.request_finished(request, list(request.blocks)):
            self.saving[request.request_id] = request
            self.new_saving.append(request.request_id)
        elif request.request_id not in self.loading:
            self._release(request)

    def _release(self, request: Request) -> None:
        for block in request.blocks:
            for pool in self.pools:
                pool[block] = _GARBAGE
        self.free += request.blocks
        request.blocks = []
        request.state = "done"
        if request.request_id in self.requeued:
            self.requeued.remove(request.request_id)
            request.state, request.computed, request.new_tokens = (
                "new",
                0,
                request.new_tokens - request.generated,
            )
            request.generated = 0
            self.waiting.append(request)

    def _poll(self) -> None:
        loading, self.new_loading = self.new_loading, []
        saving, self.new_saving = self.new_saving, []
        for rank, worker in enumerate(self.workers):
            saved, loaded = worker.get_finished(list(saving), list(loading))
            self.ended[rank] |= {-number for number in saved} | set(loaded)
        for number in set.intersection(*self.ended):
            for ended in self.ended:
                ended.discard(number)
            if number > 0:
                self.loading.pop(number, None)
            else:
                request = self.saving.pop(-number)
                self.loading.pop(-number, None)
                self._release(request)


def expected(request: Request, rank: int, position: int) -> torch.Tensor:
    """[layers, 2, dim] of this position: a function of the tokens up to it, and of what sets requests apart."""
    tokens = array("I", request.tokens[: position + 1]).tobytes()
    seed = zlib.crc32(
        tokens + f"{rank} {request.cache_salt} {request.lora_task_id} {request.multimodal_hashes}".encode()
    )
    values = torch.arange(LAYERS * 2 * DIM, dtype=torch.float32).reshape(LAYERS, 2, DIM)
    return values + seed % (1 << 20)
