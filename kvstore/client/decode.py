"""What the daemon's messages say, as records: arrays are views of the message's bytes."""

from __future__ import annotations

import grpc

from kvstore.errors import KvstoreError, from_grpc_code
from kvstore.moves import Grant, Slots
from kvstore.wire.packed import u8_of, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["grant_of", "refusal_of", "slots_of"]

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def grant_of(answer: pb.Grant) -> Grant:
    """The answer to an acquire."""
    return Grant(
        outcomes=u8_of(answer.outcomes),
        hbm_slots=u32_of(answer.hbm_slots),
        hbm_generations=u32_of(answer.hbm_generations),
        dram_slots=u32_of(answer.dram_slots),
        dram_generations=u32_of(answer.dram_generations),
        reserve_slots=u32_of(answer.reserve_slots),
        reserve_generations=u32_of(answer.reserve_generations),
    )


def slots_of(answer: pb.Slots) -> Slots:
    """Slots to fill, given ahead."""
    return Slots(
        hbm_slots=u32_of(answer.hbm_slots),
        hbm_generations=u32_of(answer.hbm_generations),
        dram_slots=u32_of(answer.dram_slots),
        dram_generations=u32_of(answer.dram_generations),
    )


def refusal_of(answer: pb.StreamError) -> KvstoreError:
    """Why a message was refused."""
    retry_after_s = answer.retry_after_ms / 1000 if answer.retry_after_ms else None
    code = _CODE_NAMES.get(answer.code, "UNKNOWN")
    return from_grpc_code(code, answer.message, retry_after_s=retry_after_s)
