"""Which device an engine runs on, and in which dtype: resolves `auto`, and says in one line what is lacking.

Imports torch only where the packages of the `cuda` extra are installed.
"""

import importlib.util
import re

from kvstore.errors import ConfigError

__all__ = ["compute_dtype", "device_index", "device_name", "resolve_device"]

_PACKAGES = {"cuda.bindings": "cuda-bindings", "cupy": "cupy-cuda13x", "triton": "triton"}


def resolve_device(wanted: str) -> str:
    """`cpu` or `cuda:N` for `auto`, `cpu`, `cuda` or `cuda:N`. ConfigError where what is wanted is not there."""
    if wanted == "cpu":
        return wanted
    if wanted != "auto" and not re.fullmatch(r"cuda(:\d+)?", wanted):
        raise ConfigError(f"worker.device: {wanted!r} is not auto, cpu, cuda or cuda:N")
    index = device_index(wanted)
    problem = _problem(index)
    if problem is None:
        return f"cuda:{index}"
    if wanted == "auto":
        return "cpu"
    raise ConfigError(f"worker.device: {wanted} cannot be used: {problem}")


def device_index(device: str) -> int:
    """The number of a CUDA device; 0 for the others."""
    return int(device.partition(":")[2] or 0)


def device_name(device: str) -> str:
    """What a CUDA device calls itself; empty for the CPU."""
    if device == "cpu":
        return ""
    import torch

    return torch.cuda.get_device_name(device_index(device))


def compute_dtype(device: str) -> str:
    """The dtype of weights, activations and KV there, by its torch name."""
    return "float32" if device == "cpu" else "bfloat16"


def _problem(index: int) -> str | None:
    """Why the CUDA device of that number cannot be used."""
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        return f"{', '.join(missing)} not installed (pip install 'kvstore[cuda]')"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    count = torch.cuda.device_count()
    return None if index < count else f"torch sees {count} CUDA device(s)"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
