"""Which copier a rank gets."""

from __future__ import annotations

import pytest

from engine_adapter.copying import cuda_copier
from engine_adapter.copying.copier import Direction, TwinCopier
from engine_adapter.copying.cuda_copier import CopyLimits, CudaCopier
from engine_adapter.external.copiers import piece_copier
from kvstore.errors import FailedPrecondition
from tests.engine_adapter.copying.copier_rigs import FakeDriver, FakeKernel


def test_a_gpus_takes_as_many_pieces_as_the_twin_and_leaves_the_engine_its_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took 16,384 pieces, 256 blocks of 64, and dropped all stores beyond; they went by kernels beside decode."""
    opened: list[int] = []

    def opens(index: int, *, limits: CopyLimits) -> CudaCopier:
        opened.append(index)
        return CudaCopier(index, limits=limits, driver=FakeDriver(), kernel=FakeKernel)

    monkeypatch.setattr(cuda_copier, "CudaCopier", opens)
    twin, nobody = piece_copier("cpu", 0)
    copier, listener = piece_copier("cuda", 3)
    try:
        assert isinstance(twin, TwinCopier)
        assert nobody is None
        assert isinstance(copier, CudaCopier)
        assert listener is copier
        assert opened == [3]
        way = copier._ways[Direction.STORE]
        assert way._limits.max_blocks == twin._max_blocks
        assert way.planner.computing
    finally:
        twin.close(5.0)
        copier.close(5.0)


def test_there_is_none_for_other_devices() -> None:
    with pytest.raises(FailedPrecondition, match="of the kind xpu"):
        piece_copier("xpu", 0)
