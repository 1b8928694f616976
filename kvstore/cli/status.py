"""Show what the service holds: tiers, sessions, counters, and what a person should act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstore.cli.admin import open_client
from kvstore.cli.loads import load_lines, loads_dict
from kvstore.cli.status_policies import policy_lines, policy_values
from kvstore.cli.status_sharing import sharing_parts, sharing_values, use_of, used_for
from kvstore.units import format_count, format_duration, format_size
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["status"]

_BAR_WIDTH = 12
_TIER_FIELDS = tuple(
    field.name
    for field in pb.TierStats.DESCRIPTOR.fields
    if field.name not in ("tier", "policy", "in_charge", "shadows")
)
_SESSION_FIELDS = tuple(
    field.name for field in pb.SessionStats.DESCRIPTOR.fields if field.name not in ("cache_use", "loads")
)
_DEVICE_FIELDS = tuple(field.name for field in pb.DeviceStats.DESCRIPTOR.fields)
_PATH_FIELDS = tuple(field.name for field in pb.PathStats.DESCRIPTOR.fields)
_GPU_FIELDS = tuple(field.name for field in pb.GpuStats.DESCRIPTOR.fields if field.name != "links")
_KINDS = {pb.DEVICE_KIND_UNSPECIFIED: "not known", pb.DEVICE_KIND_TWIN: "twin", pb.DEVICE_KIND_CUDA: "GPU"}
_OLD_S = 60.0
"""Age of NVML's answers from which they are worth a word: they come every few seconds."""


def status(
    *,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    counters: Annotated[bool, typer.Option("--counters", help="Also counters that are zero.")] = False,
) -> None:
    """Show what the service holds."""
    with open_client(socket) as client:
        described, stats = client.describe(), client.stats()
    if as_json:
        print(json.dumps(_as_dict(described, stats), indent=2))
    else:
        Console().print(_render(described, stats, every_counter=counters))


def _as_dict(described: pb.DescribeReply, stats: pb.StatsReply) -> Mapping[str, object]:
    return {
        "version": described.version,
        "protocol_version": described.protocol_version,
        "boot_epoch": stats.boot_epoch,
        "pid": described.pid,
        "keeper_pid": described.keeper_pid,
        "uptime_s": stats.uptime_s,
        "ready": stats.ready,
        "paused": stats.paused,
        **sharing_values(stats),
        "rows": stats.rows,
        "max_rows": stats.max_rows,
        "queued_reads": stats.queued_reads,
        "queued_writes": stats.queued_writes,
        "moves_in_flight": stats.moves_in_flight,
        "tiers": [
            {"tier": tier.tier, **{name: getattr(tier, name) for name in _TIER_FIELDS}, **policy_values(tier)}
            for tier in stats.tiers
        ],
        "sessions": [
            {**{name: getattr(item, name) for name in _SESSION_FIELDS}, "cache": use_of(item.cache_use).value}
            | loads_dict(item)
            for item in stats.sessions
        ],
        "paths": [{name: getattr(item, name) for name in _PATH_FIELDS} for item in stats.paths],
        "devices": [{name: getattr(item, name) for name in _DEVICE_FIELDS} for item in stats.devices],
        "gpus": [
            {**{name: getattr(item, name) for name in _GPU_FIELDS}, "links": list(item.links)}
            for item in stats.gpus
        ],
        "dram_curve": [
            {"dram_bytes": point.dram_bytes, "hit_rate": point.hit_rate} for point in stats.dram_curve
        ],
        "pins": [
            {"owner": pin.owner, "blocks": pin.blocks, "ends_in_s": pin.ends_in_s} for pin in stats.pins
        ],
        "counters": dict(sorted(stats.counters.items())),
        "warnings": list(stats.warnings),
    }


def _render(described: pb.DescribeReply, stats: pb.StatsReply, *, every_counter: bool) -> RenderableType:
    state = used_for(stats) if stats.ready else "going down"
    keeper = f", keeper {described.keeper_pid}" if described.keeper_pid else ""
    head = Text.assemble(
        ("kvstore ", "bold"),
        f"{described.version} {state}, up {format_duration(round(stats.uptime_s))}, daemon {described.pid}{keeper}; ",
        f"{format_count(stats.rows)} of {format_count(stats.max_rows)} blocks known",
        _moves(stats),
    )
    parts: list[RenderableType] = [head, _tiers(stats)]
    parts += [Text(line) for line in policy_lines(stats.tiers)]
    if stats.paths:
        parts.append(_paths(stats))
    if early := _read_ahead(stats.counters):
        parts.append(Text(early))
    parts += sharing_parts(stats)
    parts += [Text(_pinned(pin)) for pin in stats.pins]
    if len(stats.dram_curve) > 1:
        parts.append(Text(_curve(stats)))
    if stats.devices:
        parts.append(_devices(stats))
    if stats.gpus:
        parts.append(_gpus(stats))
    if stats.sessions:
        parts.append(_sessions(stats))
        parts += [Text(line) for line in load_lines(stats)]
    shown = {name: value for name, value in sorted(stats.counters.items()) if value or every_counter}
    if shown:
        parts.append(_counters(shown))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in stats.warnings]
    return Group(*parts)


def _pinned(pin: pb.PinStats) -> str:
    owner = pin.owner or "nobody in particular"
    left = format_duration(pin.ends_in_s)
    return f"pinned by {owner}: {format_count(pin.blocks)} blocks, the last of them for another {left}"


def _moves(stats: pb.StatsReply) -> str:
    """What is under way between DRAM and the disks; nothing where nothing is."""
    if not (stats.moves_in_flight or stats.queued_reads or stats.queued_writes):
        return ""
    return (
        f"; {format_count(stats.moves_in_flight)} moves under way, {format_count(stats.queued_reads)} reads and "
        f"{format_count(stats.queued_writes)} writes wait"
    )


def _read_ahead(counters: Mapping[str, int]) -> str:
    """What became of blocks that were read from disk before they were asked for; nothing where none were."""
    parts = []
    for wish, name in (
        ("prefetch", "for queued requests"),
        ("next_turn", "for the next turn of conversations"),
    ):
        useful, late, wasted = (
            counters.get(f"{wish}_{end}_bytes", 0) for end in ("useful", "late", "wasted")
        )
        if useful or late or wasted:
            parts.append(
                f"{name} {format_size(useful)} in time, {format_size(late)} late, {format_size(wasted)} for nothing"
            )
    return f"read ahead: {'; '.join(parts)}\n" if parts else ""


def _curve(stats: pb.StatsReply) -> str:
    """What other sizes of DRAM would hit, beside the one that is."""
    dram_bytes = next((tier.capacity_bytes for tier in stats.tiers if tier.tier == "dram"), 0)
    own = next((point for point in stats.dram_curve if point.dram_bytes == dram_bytes), stats.dram_curve[0])
    others = ", ".join(
        f"with {format_size(point.dram_bytes)} {100 * (point.hit_rate - own.hit_rate):+.1f} points"
        for point in stats.dram_curve
        if point is not own
    )
    return (
        f"DRAM of {format_size(own.dram_bytes)} alone would hit {own.hit_rate:.1%} of the blocks that were asked for "
        f"lately; {others} (LRU, from a sample)\n"
    )


def _table(title: str, left: Sequence[str], headers: Sequence[str]) -> Table:
    """A table that fits 80 columns; the columns of `left` hold text, the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", overflow="fold")
    return table


def _tiers(stats: pb.StatsReply) -> Table:
    table = _table(
        "tiers",
        ("tier", "memory", "in use"),
        ("tier", "memory", "in use", "blocks", "filling", "held", "orphans", "free"),
    )
    for tier in stats.tiers:
        allocated, capacity = format_size(tier.allocated_bytes), format_size(tier.capacity_bytes)
        table.add_row(
            tier.tier,
            allocated if tier.allocated_bytes == tier.capacity_bytes else f"{allocated} of {capacity}",
            ProgressBar(total=max(1, tier.slots), completed=tier.slots - tier.free_slots, width=_BAR_WIDTH),
            format_count(tier.sealed_slots),
            format_count(tier.filling_slots),
            format_count(tier.held_slots),
            format_count(tier.orphan_slots),
            format_count(tier.free_slots),
        )
    return table


def _paths(stats: pb.StatsReply) -> Table:
    table = _table(
        "NVMe paths", ("folder", "state"), ("folder", "state", "disk", "written", "amplified", "left today")
    )
    for path in stats.paths:
        size, taken = format_size(path.capacity_bytes), format_size(path.disk_bytes)
        amplified = path.written_bytes / path.accepted_bytes if path.accepted_bytes else 0.0
        table.add_row(
            path.path,
            _path_state(path),
            f"{taken} of {size}" if path.disk_bytes else f"? of {size}",
            format_size(path.written_bytes),
            f"{amplified:.2f}" if amplified else "-",
            format_size(path.write_budget_left_bytes) if path.write_budget_bytes else "no bound",
        )
    return table


def _path_state(path: pb.PathStats) -> Text:
    if not path.in_service:
        return Text("out of service", style="yellow")
    if path.hangs:
        return Text("does not answer", style="yellow")
    if path.reads_paused or path.writes_paused:
        what = (
            "all" if path.reads_paused and path.writes_paused else "reads" if path.reads_paused else "writes"
        )
        return Text(f"fails {what}", style="yellow")
    if path.leaving_extents:
        return Text(f"resizing, {format_count(path.leaving_extents)} slabs to go", style="yellow")
    return Text("in service")


def _devices(stats: pb.StatsReply) -> Table:
    table = _table(
        "devices whose HBM is owned", ("kind", "survives"), ("id", "kind", "HBM", "orphaned", "survives")
    )
    for device in stats.devices:
        plain = device.plain_bytes > 0
        table.add_row(
            str(device.index),
            _KINDS.get(device.kind, "not known"),
            format_size(device.owned_bytes),
            format_size(device.orphan_bytes),
            Text("no: not exportable", style="yellow") if plain else Text("its worker"),
        )
    return table


def _gpus(stats: pb.StatsReply) -> Table:
    table = _table("GPUs", ("name",), ("name", "in use", "free", "ECC", "Xid", "NUMA"))
    for gpu in stats.gpus:
        old = f" ({format_duration(round(gpu.age_s))} ago)" if gpu.age_s > _OLD_S else ""
        table.add_row(
            f"{gpu.name}{old}",
            format_size(gpu.memory_used_bytes),
            format_size(gpu.memory_free_bytes),
            Text(format_count(gpu.ecc_uncorrected), style="yellow" if gpu.ecc_uncorrected else ""),
            str(gpu.last_xid) if gpu.xid_events else "none",
            str(gpu.numa_node) if gpu.numa_node >= 0 else "?",
        )
    return table


def _sessions(stats: pb.StatsReply) -> Table:
    table = _table(
        "sessions",
        ("name", "state"),
        ("id", "name", "state", "processes", "HBM held", "DRAM held", "age"),
    )
    for item in stats.sessions:
        table.add_row(
            str(item.session),
            item.name,
            Text(item.state, style="" if item.state == "attached" else "yellow"),
            str(item.members),
            format_count(item.held_hbm_slots),
            format_count(item.held_dram_slots),
            format_duration(round(item.age_s)),
        )
    return table


def _counters(counters: Mapping[str, int]) -> Table:
    table = _table("counters since this start", ("counter",), ("counter", "count"))
    for name, value in counters.items():
        table.add_row(name, format_count(value))
    return table
