"""Triton kernels on the CPU: its interpreter runs each program in numpy, slowly and in float32.

Import this before any module of kernels: whether a kernel is interpreted is decided when it is defined. Triton is large
(over 1 GB installed) and no dependency of the tests; `pip install "triton>=3.9"` brings these tests in.
"""

import importlib.metadata
import importlib.util
import os

import pytest
import torch

__all__ = ["needs_interpreter"]

_FIRST = (3, 9)  # 3.6 fails on numpy 2.4; those between were not tried

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _why_not() -> str:
    """Why kernels cannot be interpreted here; empty where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available():
        return "kernels are compiled here: tests/gpu holds them to the same"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST:
        return f"the interpreter of triton {version} does not know this numpy"
    from triton.runtime.interpreter import InterpretedFunction

    from engine_adapter.engine.attention import paged_kernel

    if not isinstance(paged_kernel._walk, InterpretedFunction):
        return "kernels were imported before the interpreter was chosen"
    return ""


_reason = _why_not()
needs_interpreter = pytest.mark.skipif(bool(_reason), reason=_reason)
