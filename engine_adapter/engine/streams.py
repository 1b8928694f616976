"""The queue that a runner's kernels go through: events, staging memory and graphs; on a GPU, and its twin.

One thread uses a queue at a time. On the twin everything has happened when a call returns.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaQueue", "Event", "HostQueue", "Queue"]


class Event(Protocol):
    """A point in a queue."""

    def synchronize(self) -> None:
        """Returns when everything that was queued before it has completed."""
        ...


class Queue(Protocol):
    """Kernels in order."""

    def current(self) -> AbstractContextManager[object]:
        """While it lasts, what torch launches goes through this queue."""
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
        ...

    def staging(self, size: int) -> Tensor:
        """Host memory of `size` int32 that copies to and from the device need not wait for."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of a few contiguous int32 between a staging and the device, behind no copies of blocks."""
        ...

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """What queues `body`'s kernels again, over the same tensors. Runs `body` before it returns.

        `body` must depend on nothing but the contents of tensors that live on.
        """
        ...


class _Nothing:
    def synchronize(self) -> None:
        pass


class HostQueue:
    """The twin."""

    def current(self) -> AbstractContextManager[object]:
        """See Queue."""
        return contextlib.nullcontext()

    def record(self) -> Event:
        """See Queue."""
        return _Nothing()

    def staging(self, size: int) -> Tensor:
        """See Queue."""
        return torch.zeros(size, dtype=torch.int32)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Queue."""
        target.copy_(source)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """See Queue."""
        body()
        return body


class CudaQueue:
    """A stream of one device. Graphs share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        """Waits for what torch's default stream has queued: weights are made there, and this one is not behind it."""
        from engine_adapter.engine.kernels.words import copy_words  # Triton is on GPU machines alone

        torch.cuda.synchronize(device)
        self._copy_words = copy_words
        self._device = device
        # Before the kernels of stores, which have the lowest priority, as torch's streams have by default.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See Queue."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def record(self) -> Event:
        """See Queue."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def staging(self, size: int) -> Tensor:
        """See Queue."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Queue."""
        self._copy_words(target, source)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """See Queue. Kernels are compiled and libraries make their workspaces in two runs before the capture."""
        for _ in range(2):
            body()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: the copier's threads go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        return graph.replay
