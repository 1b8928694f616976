"""Counters of the shell: what the store does not see. Monotonic in one boot; their names are those of the metrics."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Counters"]


class Counters:
    """Named counters. Every name is listed, so that a metric exists from the start, at zero. Owner loop only."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a counter that is listed."""
        self._values[name] += count

    def values(self) -> Mapping[str, int]:
        """A copy of all."""
        return dict(self._values)


_NAMES = (
    "attaches_total",
    "calls_failed_total",
    "descriptor_refusals_total",
    "guard_tiers_out_total",
    "hbm_distrusted_total",
    "internal_errors_total",
    "keeper_restarts_total",
    "messages_refused_total",
    "messages_total",
    "mover_restarts_total",
    "nvme_commits_total",
    "nvme_hangs_total",
    "nvme_hung_movers_killed_total",
    "nvme_indexes_lost_total",
    "nvme_pauses_total",
    "nvme_slabs_lost_total",
    "nvme_slabs_refused_total",
    "orphan_bytes_dropped_total",
    "plan_both_ends_requests_total",
    "plan_compute_requests_total",
    "plan_computed_blocks_total",
    "plan_load_requests_total",
    "plan_loaded_blocks_total",
    "policy_faults_total",
    "resumes_total",
    "sessions_dead_total",
    "sessions_lost_total",
    "streams_overflowed_total",
    "streams_total",
)
