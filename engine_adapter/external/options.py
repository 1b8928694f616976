"""What an engine's own configuration may say about the store: a mapping of names to values, checked once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import cast

from kvstore.cache_use import CacheUse
from kvstore.errors import ConfigError

__all__ = ["NOT_OF_TRTLLM", "NOT_OF_VLLM", "ConnectorOptions", "cache_use", "option_types", "read_options"]

NOT_OF_VLLM = frozenset({"answer_patience_s"})
NOT_OF_TRTLLM = frozenset({"layout", "load_patience_s", "return_patience_s"})
"""Options that would do nothing there, so they are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """All optional. Times in seconds."""

    socket: str = ""
    """Of the daemon; empty: where `kvstore serve` listens by default."""
    name: str = ""
    """What people see of this engine; empty: the engine's name and its model's."""
    cache: str = "on"
    """What this engine does with the cache: `on`, `read`, `write`, `off` or `dry-run` (kvstore/cache_use.py)."""
    tenant: str = ""
    """Whose blocks they are; two tenants share none. Empty: nobody's in particular."""
    layout: str = "auto"
    """`shared`: blocks as the bundled engine has them, converted where the engine's differ. `native`: as they lie,
    for engines of one kind alone. `auto`: shared where the KV is in host memory and the model is one that the bundled
    engine knows, else native."""
    room_blocks: int = 0
    """DRAM slots in hand for stores; 0: what two steps of the engine can fill, at most an eighth of DRAM."""
    timeout_s: float = 5.0
    """Of a call to the daemon; none is made on the engine's threads."""
    lookup_patience_s: float = 2.0
    """How long a queued request may wait for what is on its way: blocks that are being read from a disk, a namespace
    that is being opened, a daemon that is expected back."""
    load_patience_s: float = 10.0
    """How long a load may take to begin once the engine has taken pages for it."""
    answer_patience_s: float = 0.1
    """TensorRT-LLM alone: how long a lookup waits for the daemon, and the whole engine with it; usually 1 ms."""
    breaker_s: float = 1.0
    """A daemon that is away or silent for so long is asked for nothing until it answers again."""
    return_patience_s: float = 5.0
    """How long after it went, or fell silent, a daemon is expected back: requests wait for it, `lookup_patience_s` each
    at most, and so do loads that had begun. Later it is no cache until it answers. `breaker_s` at least."""

    def __post_init__(self) -> None:
        cache_use(self.cache)
        if self.layout not in ("auto", "native", "shared"):
            raise ConfigError(f"layout must be auto, native or shared, not {self.layout!r}")
        if self.room_blocks < 0:
            raise ConfigError(f"room_blocks must not be negative, not {self.room_blocks}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name} must be a time in seconds, not {value}")
        for name in ("timeout_s", "breaker_s"):  # with 0 there would never be a daemon
            if not getattr(self, name):
                raise ConfigError(f"{name} must be more than 0")


def cache_use(value: str) -> CacheUse:
    """Raises: ConfigError for what is no way to use a cache."""
    try:
        return CacheUse(value)
    except ValueError:
        names = ", ".join(use.value for use in CacheUse)
        raise ConfigError(f"cache must be one of {names}, not {value!r}") from None


def option_types(without: Collection[str] = ()) -> dict[str, type]:
    """The type of each option by name. `without`: those that mean nothing to an engine."""
    return {
        field.name: type(field.default) for field in fields(ConnectorOptions) if field.name not in without
    }


def read_options(given: Mapping[str, object], *, without: Collection[str] = ()) -> ConnectorOptions:
    """Raises: ConfigError for an unknown name, or one of those `without`, or a value of another type."""
    known = option_types(without)
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: use one of {', '.join(sorted(known))}")
        wanted = known[name]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted:
            raise ConfigError(f"{name} must be a {wanted.__name__}, not {value!r}")
        values[name] = value
    return ConnectorOptions(**cast("dict[str, str]", values))  # type: ignore[arg-type]
