"""The shape of a block: layer groups, element type, and the slot that holds one block in every tier.

A slot is `[layer, K|V, kv_head, token, head_dim]`, contiguous, rounded up to 4 KiB (the unit of O_DIRECT and of
memory mapping). Pure data.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstore.errors import InvalidArgument

__all__ = ["DTYPE_BYTES", "SLOT_ALIGN_BYTES", "Geometry", "HitRule", "LayerGroup", "opaque_geometry"]

SLOT_ALIGN_BYTES = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_MAX_SLOT_BYTES = 1 << 30


class HitRule(enum.IntEnum):
    """Which blocks of a group a later token needs. Values are the protocol's."""

    ALL = 1
    TRAILING = 2
    CHECKPOINT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV is stored together. Counts, not bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rule: HitRule = HitRule.ALL
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.rule is not HitRule.ALL:
            raise InvalidArgument(f"hit rule {self.rule.name} is not built yet: only ALL (full attention) is")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise InvalidArgument(f"{name} must be between 1 and {1 << 20}, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What fixes the size of a block.

    Raises: InvalidArgument for an unknown dtype, no or several groups, or a block over 1 GiB.
    """

    groups: tuple[LayerGroup, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(
                f"KV dtype {self.dtype!r} is not known: use one of {', '.join(sorted(DTYPE_BYTES))}"
            )
        if len(self.groups) != 1:
            raise InvalidArgument(f"exactly one layer group is supported, not {len(self.groups)}")
        if self.slot_bytes > _MAX_SLOT_BYTES:
            raise InvalidArgument(
                f"a block of {self.payload_bytes} bytes is too large: at most {_MAX_SLOT_BYTES}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        return self.groups[0].block_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of KV in one block."""
        group = self.groups[0]
        elements = group.layers * 2 * group.kv_heads * group.block_tokens * group.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the payload rounded up to 4 KiB."""
        return -(-self.payload_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def opaque_geometry(nbytes: int) -> Geometry:
    """Some geometry with slots for blocks of so many bytes, for who moves blocks and knows nothing else of them.

    Raises: InvalidArgument as `Geometry` does.
    """
    head_dim = SLOT_ALIGN_BYTES // (2 * DTYPE_BYTES["float32"])  # a layer is 4 KiB
    group = LayerGroup(layers=-(-nbytes // SLOT_ALIGN_BYTES), kv_heads=1, head_dim=head_dim, block_tokens=1)
    return Geometry(groups=(group,), dtype="float32")
