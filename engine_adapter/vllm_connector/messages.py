"""What the two halves of vLLM's connector say to each other, in the classes that vLLM carries."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from engine_adapter.external.jobs import StepPlan, StepReport

__all__ = ["RankSaid", "StepMetadata", "StepWorkerMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """To the ranks, each step."""

    plan: StepPlan


@dataclass
class StepWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a rank, or from several."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """See KVConnectorWorkerMetadata."""
        assert isinstance(other, StepWorkerMetadata)
        return StepWorkerMetadata(self.report.add(other.report))


@dataclass(frozen=True)
class RankSaid(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank says of itself once it has its KV. `why_not`: why it cannot keep any; the rest is then empty."""

    listener: str = ""
    order: str = ""
    payload_bytes: int = 0
    shared: bool = False
    why_not: str = ""
