"""Lets the storage half of SGLang be imported without a GPU: what it imports of the device's half is replaced by none.

Real are the abstract class, the factory, the page hash, the host pools, the controller's storage calls and the failure
injector: all that the connector meets. Not real are the modules listed here, which need Triton, TVM or CUDA.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

__all__ = ["install", "is_installed"]

_WITHOUT_GPU = (
    "triton",
    "triton.language",
    "sglang.kernels.ops.kvcache.hicache",
    "sglang.srt.layers.dp_attention",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.observability.metrics_collector",
)


class _Nothing(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: list[str] = []  # noqa: RUF012 (as importlib wants it)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda *_args, **_options: None})
        setattr(self, name, made)
        return made

    @staticmethod
    def jit(function: Any = None, **_: object) -> Any:
        """As a decorator, with and without arguments."""
        return function if function is not None else lambda found: found


def is_installed() -> bool:
    """Whether there is an SGLang at all. Imports nothing."""
    return importlib.util.find_spec("sglang") is not None


def install() -> None:
    """Before the first import of SGLang. What torch and transformers would ask Triton for they ask before."""
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401
    import transformers  # noqa: F401

    for name in _WITHOUT_GPU:
        if name not in sys.modules:
            sys.modules[name] = _Nothing(name)
            parent, _, child = name.rpartition(".")
            if isinstance(sys.modules.get(parent), _Nothing):
                setattr(sys.modules[parent], child, sys.modules[name])
