"""Passes over KV that is still being loaded: each layer waits, on the host, until the KV that it reads has come.

A kernel of a layer is launched only when its pages hold that layer of every cached block, so what is in flight never
reads a page ahead of its load. A layer writes the pages of the tokens that are being computed alone. One thread.
"""

from collections.abc import Sequence

from torch import Tensor

from engine_adapter.base import Arriving
from engine_adapter.engine.attention.base import StepAttention
from engine_adapter.engine.models.fused import PassAttention
from engine_adapter.engine.request import Chunk, Request
from engine_adapter.engine.weights import LayerWeights

__all__ = ["LateKv", "pass_over", "step_over"]


class LateKv(Exception):
    """A pass was broken off: the cached prefix of this request does not come."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.id)
        self.request = request


class _Gate:
    """The requests of a step whose KV is under way."""

    def __init__(self, waiting: Sequence[tuple[Request, Arriving]]) -> None:
        self._waiting = waiting

    def wait(self, layer: int) -> None:
        """Returns when that layer of all of them has come. Raises LateKv."""
        for request, arriving in self._waiting:
            if not arriving.wait_for(layer):
                raise LateKv(request)


class _GatedStep:
    """`StepAttention`."""

    def __init__(self, gate: _Gate, inner: StepAttention) -> None:
        self._gate = gate
        self._inner = inner

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._inner.write(layer, key, value)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        self._gate.wait(layer)
        return self._inner.attend(layer, query)


class _GatedPass:
    """`PassAttention`."""

    def __init__(self, gate: _Gate, inner: PassAttention) -> None:
        self._gate = gate
        self._inner = inner

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: LayerWeights) -> Tensor:
        self._gate.wait(layer)
        return self._inner.attend(layer, query, key, value, weights)


def step_over(chunks: Sequence[Chunk], attention: StepAttention) -> StepAttention:
    """`attention` of a pass over these chunks, held back where KV of theirs is under way. It then raises LateKv."""
    waiting = _waiting(chunks)
    return _GatedStep(_Gate(waiting), attention) if waiting else attention


def pass_over(chunks: Sequence[Chunk], attention: PassAttention) -> PassAttention:
    """The same for the passes of a GPU."""
    waiting = _waiting(chunks)
    return _GatedPass(_Gate(waiting), attention) if waiting else attention


def _waiting(chunks: Sequence[Chunk]) -> list[tuple[Request, Arriving]]:
    return [(c.request, c.request.arriving) for c in chunks if c.request.arriving is not None]
