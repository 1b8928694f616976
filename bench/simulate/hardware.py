"""What a simulated machine does in how long: arithmetic, no measurement.

The defaults are those of the H200 of `bench/results/h200` with the bundled engine, and of a common NVMe disk. Prefill
takes its operations (`bench.work`) at the measured rate of the engine; a decode step what it must read, at the measured
rate with 32 requests in a batch, whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.work import decode_step_bytes, prefill_flops
from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.shapes import known_shapes, shape_of
from kvstore.errors import InvalidArgument

__all__ = ["Hardware", "Model", "model_of"]

_ITEMSIZE = 2  # bfloat16
_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one machine."""

    gpus: int = 1
    """As one: so many times the operations and the reads a second."""
    flops_per_s: float = 616e12
    hbm_bytes_per_s: float = 3.67e12
    copy_bytes_per_s: float = 54e9
    """DRAM to HBM, and as much the other way at the same time."""
    disk_read_bytes_per_s: float = 6e9
    disk_write_bytes_per_s: float = 3e9
    disk_latency_s: float = 100e-6
    step_s: float = 0.005
    """What a first token takes besides: scheduling, launches, the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's shape on a machine."""

    name: str
    config: ModelConfig
    hardware: Hardware

    @property
    def token_bytes(self) -> int:
        """KV of a token."""
        return self.config.kv_token_bytes(_ITEMSIZE)

    def prefill_s(self, cached_tokens: int, prompt_tokens: int) -> float:
        """Until the first token of a prompt whose first tokens are in HBM."""
        flops = prefill_flops(self.config, prompt_tokens) - prefill_flops(self.config, cached_tokens)
        return self.hardware.step_s + flops / (self.hardware.flops_per_s * self.hardware.gpus)

    def decode_s(self, context_tokens: int, output_tokens: int) -> float:
        """All tokens of an answer behind the first."""
        step_bytes = decode_step_bytes(
            self.config, batch=_BATCH, context_tokens=context_tokens, itemsize=_ITEMSIZE
        )
        return output_tokens * step_bytes / (self.hardware.hbm_bytes_per_s * self.hardware.gpus)


def model_of(name: str, hardware: Hardware) -> Model:
    """A known shape by name. Raises: InvalidArgument."""
    config = shape_of(name)
    if config is None:
        raise InvalidArgument(f"--model: no shape is named {name!r}; there are: {', '.join(known_shapes())}")
    return Model(name=name, config=config, hardware=hardware)
