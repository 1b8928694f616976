"""Whether a load comes in groups of layers, and in how many: its request then computes the first layers while the
others are under way. Pure.

A slot is `[layer, K|V, kv_head, token, head_dim]`, so the layers [l, m) of a block are one piece of it. A group has the
same layers of all blocks that are loaded. It pays where the step that waits for them has much to compute: of a few
tokens each layer takes microseconds, and all that is left is that pieces are smaller and that runs of neighbouring
slots cannot be copied as one. It is for a request that is alone: where others run, their steps fill the time of a load
as it is, and a step that waits for one would hold their tokens up.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.geometry import Geometry
from kvstore.planning.speeds import PrefillSpeed, TierSpeed

__all__ = ["LayerGroups", "layer_groups_of"]

_LEAST_BYTES = 1 << 20
"""Of a piece: on an H200 copies of scattered 4 MiB, 256 KiB and 64 KiB reach 0.98, 0.95-0.98 and 0.93-0.95 of a raw
copy; a group more than four gains little beside that."""
_LEAST_TOKENS = 1024
_LEAST_SHARE = 0.25
"""Of a load's time, what the first step must have to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Of one engine. `most` groups are as many as blocks have pieces that are large enough: 1 where it never pays."""

    layers: int
    slot_bytes: int
    chunk_tokens: int
    """Most tokens of the first step; all layers have come before it ends."""
    most: int
    least_tokens: int = _LEAST_TOKENS

    def choose(
        self,
        *,
        blocks: int,
        cached_tokens: int,
        num_tokens: int,
        prefill: PrefillSpeed | None = None,
        dram: TierSpeed | None = None,
    ) -> int:
        """Groups of a load of so many blocks, for a request that is alone and then computes what is not cached.

        `prefill`, `dram`: what was measured lately; where nothing was, the tokens decide.
        """
        end = min(num_tokens, cached_tokens + self.chunk_tokens)
        if not blocks or end - cached_tokens < self.least_tokens:
            return 1
        if prefill is not None and dram is not None:
            load_s = dram.seconds(blocks * self.slot_bytes)
            if prefill.seconds(cached_tokens, end, self.chunk_tokens) < _LEAST_SHARE * load_s:
                return 1
        return self.most


def layer_groups_of(
    geometry: Geometry,
    *,
    chunk_tokens: int,
    least_tokens: int = _LEAST_TOKENS,
    least_bytes: int = _LEAST_BYTES,
) -> LayerGroups:
    """For blocks of this shape; a group is a whole number of layers and at least so many bytes of each block.

    A slot with padding at its end has no equal slices: its blocks come whole.
    """
    layers = geometry.groups[0].layers
    most = 1
    if geometry.slot_bytes == geometry.payload_bytes:
        pieces = max(1, geometry.slot_bytes // least_bytes)
        most = max(count for count in range(1, layers + 1) if layers % count == 0 and count <= pieces)
    return LayerGroups(
        layers=layers,
        slot_bytes=geometry.slot_bytes,
        chunk_tokens=chunk_tokens,
        most=most,
        least_tokens=least_tokens,
    )
