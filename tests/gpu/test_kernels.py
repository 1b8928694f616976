"""The small fused kernels on a GPU, against torch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.nn import functional  # noqa: E402

from engine_adapter.engine.kernels.activation import silu_mul  # noqa: E402
from engine_adapter.engine.kernels.norm import add_rms_norm, rms_norm  # noqa: E402
from engine_adapter.engine.kernels.words import copy_words  # noqa: E402
from tests.gpu.paged import error  # noqa: E402

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.mark.parametrize("rows, size", [(1, 4096), (64, 2048), (513, 576), (7, 4096), (8192, 4096)])
def test_norms(rows: int, size: int) -> None:
    x, residual = (torch.randn(rows, size, device="cuda").to(BF16) for _ in range(2))
    weight = torch.rand(size, device="cuda").to(BF16)
    expected = functional.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, 1e-5, out) is out
    assert error(out, expected) < 4e-3
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert error(normed, functional.rms_norm(total.float(), (size,), weight.float(), 1e-5)) < 4e-3


@pytest.mark.parametrize("rows, size", [(1, 14336), (33, 1536), (600, 8192)])
def test_silu_mul(rows: int, size: int) -> None:
    gate_up = torch.randn(rows, 2 * size, device="cuda").to(BF16) * 3
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = torch.full((rows, size), float("nan"), dtype=BF16, device="cuda")
    assert silu_mul(gate_up, out) is out
    assert error(out, functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize("size", [1, 5, 640, 1024, 40_000])
def test_words_go_to_the_device_and_back_through_pinned_memory(size: int) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32).pin_memory()
    there = torch.zeros(size, dtype=torch.int32, device="cuda")
    back = torch.zeros(size, dtype=torch.int32).pin_memory()
    copy_words(there, source)
    copy_words(back, there)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), source)
    assert torch.equal(back, source)
