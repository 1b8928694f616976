"""What engines have decided on prefixes below HBM, for `kvstore status`."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.units import format_count, format_duration
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["load_lines", "loads_dict"]

_COUNTS = tuple(field.name for field in pb.LoadStats.DESCRIPTOR.fields if field.name not in ("last", "tiers"))
_USES = {pb.TIER_USE_IN_USE: "in use", pb.TIER_USE_TRIAL: "on trial", pb.TIER_USE_OUT: "out of use"}


def loads_dict(item: pb.SessionStats) -> dict[str, object]:
    """For JSON; empty where the session has decided nothing."""
    if not item.HasField("loads"):
        return {}
    loads = item.loads
    tiers = [
        {
            "tier": change.tier,
            "use": _USES[change.use],
            "spent_s": change.spent_s,
            "saved_s": change.saved_s,
            "pause_s": change.pause_s,
        }
        for change in loads.tiers
    ]
    counts = {name: getattr(loads, name) for name in _COUNTS}
    return {"loads": {**counts, "last": loads.last, "tiers": tiers}}


def load_lines(stats: pb.StatsReply) -> Iterator[str]:
    """For people: a line or two for each session that has decided something."""
    for item in stats.sessions:
        if not item.HasField("loads"):
            continue
        loads = item.loads
        if loads.last:
            yield (
                f"{item.name}: of what was cached below HBM {format_count(loads.loaded_blocks)} blocks were loaded and "
                f"{format_count(loads.computed_blocks)} computed; last: {loads.last}"
            )
        for change in loads.tiers:
            tried = f", tried again after {format_duration(round(change.pause_s))}" if change.pause_s else ""
            yield (
                f"{item.name}: {change.tier} is {_USES[change.use]}: it cost {change.spent_s:.2f} s and saved "
                f"{change.saved_s:.2f} s{tried}"
            )
