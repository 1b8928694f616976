"""Settings of an engine: one frozen record, validated where it is made. Imports no torch."""

from dataclasses import dataclass

from kvstore.errors import ConfigError

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`deterministic` makes a token's logits bitwise equal cold, behind any cached prefix and in any company.

    `device` is `cpu` or `cuda:N` (`engine.device` resolves `auto`), `device_name` what a GPU is called. `attention`
    says who computes it on a GPU: `triton`, our own kernels, or `flashinfer`, where it has some for the model's shape.
    `overlap` is how many steps stay in flight while the next one is scheduled: 1 on a GPU, 0 where a launched step has
    ended.
    `tensor_parallel`: devices that share the model, from `device` on.
    `chunk_tokens` is a step's token budget beside decoding requests. `max_tokens` bounds a request's tokens, prompt and
    answer; None is the model's own context. `threads` is torch's, for the whole process; None leaves it alone
    (deterministic mode compares equal only under equal thread counts). Of `canary_every` requests with a cached prefix
    one has a cached block computed again and compared; 0: none.
    """

    deterministic: bool = False
    device: str = "cpu"
    device_name: str = ""
    attention: str = "triton"
    overlap: int = 0
    tensor_parallel: int = 1
    chunk_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    max_tokens: int | None = None
    threads: int | None = None
    canary_every: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("triton", "flashinfer"):
            raise ConfigError(f"attention must be triton or flashinfer, not {self.attention}")
        if self.overlap not in (0, 1):
            raise ConfigError(f"overlap must be 0 or 1, not {self.overlap}")
        if self.canary_every < 0:
            raise ConfigError(f"canary_every must not be negative, not {self.canary_every}")
        for name in (
            "tensor_parallel",
            "chunk_tokens",
            "max_running",
            "max_waiting",
            "max_tokens",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, not {value}")
