"""Prometheus metrics on a loopback port, answered on the owner loop: no thread reads state that the loop changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.daemon.log import Log
from kvstore.errors import ConfigError
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["MetricsServer", "StatsCollector"]

_LOG = Log("metrics")
_HOST = "127.0.0.1"
_REQUEST_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 8192
_GPU_GAUGES = (
    "memory_total_bytes",
    "memory_used_bytes",
    "memory_free_bytes",
    "ecc_uncorrected",
    "xid_events",
    "last_xid",
    "numa_node",
    "age_s",
)
_PATH_GAUGES = (
    "capacity_bytes",
    "disk_bytes",
    "hangs",
    "in_service",
    "leaving_extents",
    "reads_paused",
    "write_budget_bytes",
    "write_budget_left_bytes",
    "writes_paused",
)
_PATH_TEXTS = {
    "hangs": "1 while the disk of an NVMe path does not answer",
    "in_service": "1 while an NVMe path is open, has a mover, and its disk answers",
}
_PATH_COUNTERS = ("accepted_bytes", "written_bytes")
_TIER_GAUGES = tuple(
    field.name
    for field in pb.TierStats.DESCRIPTOR.fields
    if isinstance(getattr(pb.TierStats(), field.name), int)
)


class StatsCollector(Collector):
    """Turns the reply of Stats into metrics, so that both show the same numbers."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All metrics, from one reply."""
        stats = self._stats()
        for name in _TIER_GAUGES:
            gauge = GaugeMetricFamily(f"kvstore_tier_{name}", f"{name} of a tier", labels=["tier"])
            for tier in stats.tiers:
                gauge.add_metric([tier.tier], getattr(tier, name))
            yield gauge
        sessions = GaugeMetricFamily("kvstore_sessions", "Sessions by state", labels=["state"])
        for state in ("attaching", "attached", "lost", "dying"):
            sessions.add_metric([state], sum(session.state == state for session in stats.sessions))
        yield sessions
        held = GaugeMetricFamily(
            "kvstore_session_held_slots", "Slots held by a session", labels=["session", "tier"]
        )
        for session in stats.sessions:
            held.add_metric([str(session.session), "hbm"], session.held_hbm_slots)
            held.add_metric([str(session.session), "dram"], session.held_dram_slots)
        yield held
        yield from _devices(stats)
        yield from _paths(stats)
        yield from _tenants(stats)
        for name, value in (
            ("rows", stats.rows),
            ("max_rows", stats.max_rows),
            ("queued_reads", stats.queued_reads),
            ("queued_writes", stats.queued_writes),
            ("moves_in_flight", stats.moves_in_flight),
            ("uptime_seconds", stats.uptime_s),
            ("paused", stats.paused),
            (
                "cache_reads",
                stats.cache_use not in (pb.CACHE_USE_OFF, pb.CACHE_USE_WRITE, pb.CACHE_USE_DRY_RUN),
            ),
            ("cache_writes", stats.cache_use not in (pb.CACHE_USE_OFF, pb.CACHE_USE_READ)),
            ("restricted", len(stats.restricted)),
            ("ready", stats.ready),
            ("warnings", len(stats.warnings)),
        ):
            yield GaugeMetricFamily(f"kvstore_{name}", name.replace("_", " "), value=value)
        for name, value in sorted(stats.counters.items()):
            bare = name.removesuffix("_total")
            yield CounterMetricFamily(f"kvstore_{bare}", bare.replace("_", " "), value=value)


def _devices(stats: pb.StatsReply) -> Iterator[Metric]:
    """HBM of each device, and each GPU as NVML sees it."""
    for name in ("owned_bytes", "orphan_bytes", "plain_bytes"):
        gauge = GaugeMetricFamily(f"kvstore_device_{name}", f"{name} of a device's HBM", labels=["device"])
        for device in stats.devices:
            gauge.add_metric([str(device.index)], getattr(device, name))
        yield gauge
    for name in _GPU_GAUGES:
        metric = f"kvstore_gpu_{name}".replace("_age_s", "_age_seconds")
        gauge = GaugeMetricFamily(metric, f"{name} of a GPU", labels=["gpu"])
        for gpu in stats.gpus:
            gauge.add_metric([gpu.uuid], getattr(gpu, name))
        yield gauge


def _paths(stats: pb.StatsReply) -> Iterator[Metric]:
    """Each NVMe path. Written over accepted bytes are its write amplification."""
    for name in _PATH_GAUGES:
        text = _PATH_TEXTS.get(name, f"{name} of an NVMe path")
        gauge = GaugeMetricFamily(f"kvstore_path_{name}", text, labels=["path"])
        for path in stats.paths:
            value = getattr(path, name)
            if name == "in_service":
                value = value and not path.hangs
            gauge.add_metric([path.path], value)
        yield gauge
    for name in _PATH_COUNTERS:
        counter = CounterMetricFamily(f"kvstore_path_{name}", f"{name} of an NVMe path", labels=["path"])
        for path in stats.paths:
            counter.add_metric([path.path], getattr(path, name))
        yield counter


def _tenants(stats: pb.StatsReply) -> Iterator[Metric]:
    """Each tenant of the configuration, and the others together as `*`: their number bounds that of the labels."""
    for name in ("used_bytes", "quota_bytes", "reserve_bytes"):
        gauge = GaugeMetricFamily(
            f"kvstore_tenant_{name}", f"{name} of a tenant in a tier", labels=["tenant", "tier"]
        )
        for tenant in stats.tenants:
            for tier in tenant.tiers:
                gauge.add_metric([tenant.tenant, tier.tier], getattr(tier, name))
        yield gauge
    evicted = CounterMetricFamily(
        "kvstore_tenant_evicted_blocks", "Victims of a tenant in a tier", labels=["tenant", "tier"]
    )
    for tenant in stats.tenants:
        for tier in tenant.tiers:
            evicted.add_metric([tenant.tenant, tier.tier], tier.evicted_blocks)
    yield evicted
    for name in ("asked_blocks", "hit_blocks"):
        counter = CounterMetricFamily(f"kvstore_tenant_{name}", f"{name} of a tenant", labels=["tenant"])
        for tenant in stats.tenants:
            counter.add_metric([tenant.tenant], getattr(tenant, name))
        yield counter


class MetricsServer:
    """Serves `GET /metrics` and nothing else, on 127.0.0.1."""

    def __init__(self, port: int, stats: Callable[[], pb.StatsReply]) -> None:
        self._port = port
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(stats))
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens. Raises ConfigError where the port is taken."""
        try:
            self._server = await asyncio.start_server(
                self._serve, _HOST, self._port, limit=_MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"metrics_port: cannot listen on {_HOST}:{self._port}: {error.strerror}"
            ) from None
        _LOG.info("metrics", url=f"http://{_HOST}:{self._port}/metrics")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_TIMEOUT_S)
            if request.startswith((b"GET /metrics ", b"GET /metrics?")):
                body, status = generate_latest(self._registry), b"200 OK"
            else:
                body, status = b"the metrics are at /metrics\n", b"404 Not Found"
            writer.write(
                b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                b"Connection: close\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
            )
            await asyncio.wait_for(writer.drain(), _REQUEST_TIMEOUT_S)
        writer.close()

    def close(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()
