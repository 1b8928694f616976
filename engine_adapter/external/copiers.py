"""The copier of a rank, by its device: pieces as they lie between the engine's pages and DRAM slots."""

from __future__ import annotations

from engine_adapter.copying.copier import Copier, TwinCopier
from kvstore.client import DramListener
from kvstore.errors import FailedPrecondition

__all__ = ["piece_copier"]

_MAX_PIECES = 1 << 20
"""A copier counts pieces, of which a block has one or two a layer; what it has no room for is not stored."""


def piece_copier(kind: str, index: int) -> tuple[Copier, DramListener | None]:
    """Who copies on that device (torch's `type` and `index`), and who pins DRAM for it. Both are the caller's.

    Raises: FailedPrecondition for a device of another kind; what `CudaCopier` raises.
    """
    if kind == "cpu":
        return TwinCopier(max_blocks=_MAX_PIECES), None
    if kind != "cuda":
        raise FailedPrecondition(f"KV on a device of the kind {kind} cannot be copied")
    from engine_adapter.copying.cuda_copier import CopyLimits, CudaCopier

    copier = CudaCopier(index, limits=CopyLimits(max_blocks=_MAX_PIECES))
    copier.computing(1)  # nobody tells when such an engine computes: as if it always did
    return copier, copier
