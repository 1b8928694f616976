"""Which device an engine runs on, and in which dtype: resolves `auto`, and says in one line what is lacking.

Asks the driver, not torch, whose import takes seconds that others use meanwhile.
"""

import importlib.util
import re
from pathlib import Path

from engine_adapter.copying.cuda_driver import cuda_devices
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
    if not _torch_has_cuda():
        return "torch was built without CUDA"
    count = cuda_devices()
    if not count:
        return "the driver shows no CUDA device"
    return None if index < count else f"the driver shows {count} CUDA device(s)"


def _torch_has_cuda() -> bool:
    """Whether the installed torch has its CUDA library, found without importing it."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or []) if found is not None else []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
