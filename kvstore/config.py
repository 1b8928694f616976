"""The configuration: one frozen tree, resolved once from flags, environment, a TOML file and defaults, in that order.

Owns what can be configured and what is a valid value. Pure: the caller passes the environment and the file's text
(`kvstore.cli.settings` does). A key is a field's name without the unit: `dram_bytes` is written `dram = "8GiB"` in the
file, `KVSTORE_DRAM=8GiB` in the environment and `--dram 8GiB` on the command line; `limits.call_deadline_s` is
`call_deadline = "5s"` under `[limits]` and `KVSTORE_LIMITS_CALL_DEADLINE`. Every fault is a ConfigError of one line.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvstore.cache_use import CacheUse
from kvstore.errors import ConfigError
from kvstore.tenant import Tenant, check_reserves, check_tenants
from kvstore.units import GIB, KIB, MIB, format_size, write_size

__all__ = [
    "ClientConfig",
    "Config",
    "Durability",
    "HbmBudget",
    "Limits",
    "NvmePath",
    "NvmeThrottle",
    "Recovery",
    "ServeConfig",
    "WorkerConfig",
    "check_socket_path",
    "default_socket",
    "parse_toml",
]

MAX_SESSIONS = 48  # bits of a slot's holders word that sessions have; the other 16 are the movers'
MAX_NVME_PATHS = 16
_PAGE_BYTES = 4 * KIB
_MAX_SLOTS = (1 << 32) - 2  # of one tier: their numbers have 32 bits
_SUN_PATH_BYTES = 107  # of sun_path, without its NUL
_LONGEST_SUFFIX = ".stream"


def _require(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {problem}")


class Durability(Enum):
    """What blocks on the NVMe tier survive: docs/durability.md."""

    NONE = "none"
    """The memory that knows them: no index is written and nothing is forced, so they end with daemon and keeper."""
    PROCESS = "process"
    """kill -9 of any process: they are in the index, which is forced to the device only at Flush and at the end."""
    POWER = "power"
    """A power cut: fdatasync, then the index, before a block counts as written."""


class Recovery(Enum):
    """What a start does with the blocks that the NVMe tier holds: docs/durability.md."""

    QUIET = "quiet"
    """Takes what can be verified, counts and logs the rest."""
    STRICT = "strict"
    """Does not start where something is damaged or missing."""
    NONE = "none"
    """Begins empty: the slabs are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmePath:
    """A directory on one disk and how many bytes of it the tier may use, index included."""

    path: str
    capacity_bytes: int

    def __post_init__(self) -> None:
        _require(self.path.startswith("/"), "nvme", f"the path {self.path!r} must be absolute")
        _require(
            self.capacity_bytes >= 64 * MIB,
            "nvme",
            f"{format_size(self.capacity_bytes)} for {self.path} is too little: at least 64MiB",
        )

    def __str__(self) -> str:
        return f"{self.path}:{write_size(self.capacity_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeThrottle:
    """The most that goes to or from the disk of one path in a second; 0: no bound. Operations are calls of the disk."""

    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    read_operations_per_s: int = 0
    write_operations_per_s: int = 0

    def __post_init__(self) -> None:
        least = min(
            self.read_bytes_per_s,
            self.write_bytes_per_s,
            self.read_operations_per_s,
            self.write_operations_per_s,
        )
        _require(least >= 0, "nvme_throttle", "a bound must not be negative")

    def __bool__(self) -> bool:
        return self != NvmeThrottle()

    def __str__(self) -> str:
        sizes = {"read": self.read_bytes_per_s, "write": self.write_bytes_per_s}
        counts = {"read_ops": self.read_operations_per_s, "write_ops": self.write_operations_per_s}
        parts = [f"{name}={write_size(value)}" for name, value in sizes.items() if value]
        return ",".join([*parts, *(f"{name}={value}" for name, value in counts.items() if value)])


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmBudget:
    """KV memory of a device: a size, or a share of what is free there when the worker starts. One of them is 0."""

    size_bytes: int = 0
    share_percent: int = 0

    def __post_init__(self) -> None:
        if self.share_percent:
            _require(
                1 <= self.share_percent <= 100, "worker.hbm", "a share of what is free is from 1% to 100%"
            )
        else:
            _require(self.size_bytes >= MIB, "worker.hbm", "must be at least 1MiB")

    def __str__(self) -> str:
        return f"{self.share_percent}%" if self.share_percent else write_size(self.size_bytes)

    def of(self, free_bytes: int) -> int:
        """The budget in bytes, where `free_bytes` are free."""
        return self.size_bytes or free_bytes * self.share_percent // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of queues, messages and waits. A bound that is reached drops or refuses, and is counted."""

    chain_blocks: int = 65_536
    """Blocks in the chain of one acquire, prefetch or explain."""
    message_bytes: int = 4 * MIB
    """One gRPC message, either way."""
    session_queue_messages: int = 1_024
    """Answers waiting for one session's stream; a client that reads no more loses its stream."""
    session_leases: int = 4_096
    """Requests of one session that wait for a promotion or a fill."""
    move_queue_blocks: int = 4_096
    """Writes to one NVMe path that wait; a full queue drops the write."""
    call_deadline_s: float = 5.0
    """A unary call that names no deadline."""
    flush_deadline_s: float = 60.0
    """Flush, where the call names no deadline."""
    drain_deadline_s: float = 30.0
    """From SIGTERM to the end, Flush included."""
    session_lost_s: float = 10.0
    """A session without a stream for this long gets nothing new; what it holds stays held."""

    def __post_init__(self) -> None:
        for name in ("chain_blocks", "session_queue_messages", "session_leases", "move_queue_blocks"):
            _require(getattr(self, name) >= 1, f"limits.{name}", "must be at least 1")
        _require(self.message_bytes >= 64 * KIB, "limits.message", "must be at least 64KiB")
        for name in ("call_deadline_s", "flush_deadline_s", "drain_deadline_s", "session_lost_s"):
            _require(getattr(self, name) > 0, f"limits.{name.removesuffix('_s')}", "must be more than 0s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `kvstore serve` runs: the daemon, its tiers and its bounds."""

    socket: str
    """The gRPC socket; the descriptor socket is beside it, with `.fd` appended."""
    socket_group: str | None = None
    """A group whose members may connect too (0660); None: the owner alone (0600)."""
    tcp: str | None = None
    """`host:port` to listen on as well; None: the unix socket alone."""
    metrics_port: int | None = None
    """Loopback port of the Prometheus metrics; None: none."""
    dram_bytes: int = 2 * GIB
    dram_extent_bytes: int = 64 * MIB
    """DRAM is taken, and changes its slot class, in pieces of this size."""
    nvme: tuple[NvmePath, ...] = ()
    nvme_extent_bytes: int = 256 * MIB
    """One slab file."""
    nvme_threads: int = 0
    """I/O threads of each path; 0: probe at the first start."""
    nvme_write_budget_bytes: int = 0
    """Most bytes that each path writes in 24 hours, flushes apart; 0: no bound."""
    nvme_throttle: NvmeThrottle | None = None
    """Most bytes and operations a second of each path, reads and writes; None: no bound."""
    durability: Durability = Durability.POWER
    recovery: Recovery = Recovery.QUIET
    devices: int = 1
    """GPUs (or twins) whose HBM the tables have room for."""
    hbm_bytes: int = 64 * GIB
    """The most HBM of one device that the tables have room for: 22 bytes of table for each `min_slot_bytes`."""
    min_slot_bytes: int = 64 * KIB
    """The smallest slot expected; with the capacity of a tier it gives the number of its slots."""
    max_rows: int = 1 << 20
    """Blocks that can be known at one time, in whatever tier."""
    max_sessions: int = 32
    max_namespaces: int = 1_024
    clean_percent: int = 2
    """Part of each tier's slots that the background keeps free; it begins when half of it is left. 0: none."""
    dram_policy: str = "lru"
    """Which blocks of DRAM go first: the name of an eviction policy."""
    nvme_policy: str = "lru"
    """The same of the NVMe tier."""
    prefetch_percent: int = 50
    """Most of DRAM that blocks take which were read ahead of use and not asked for yet. 0: nothing is read ahead."""
    canary_every: int = 256
    """Of so many blocks served from DRAM one is checksummed again and compared; 0: none."""
    orphan_ttl_s: float = 120.0
    """How long HBM that no live session maps is kept."""
    log_level: str = "info"
    cache: CacheUse = CacheUse.ON
    """How the service begins: `kvstore pause` and `kvstore resume` change it until the daemon ends."""
    limits: Limits = field(default_factory=Limits)
    tenants: tuple[Tenant, ...] = ()

    def __post_init__(self) -> None:
        _require(self.socket.startswith("/"), "socket", f"{self.socket!r} must be an absolute path")
        check_socket_path(self.socket)
        for name in ("dram_extent_bytes", "nvme_extent_bytes", "min_slot_bytes"):
            _require(getattr(self, name) >= _PAGE_BYTES, _key(name), "must be at least 4KiB")
            _require(getattr(self, name) % _PAGE_BYTES == 0, _key(name), "must be a multiple of 4KiB")
        _require(
            self.dram_bytes >= self.dram_extent_bytes,
            "dram",
            f"{format_size(self.dram_bytes)} is less than one extent ({format_size(self.dram_extent_bytes)}): "
            "give more, or lower dram_extent",
        )
        for key, capacity_bytes in (
            ("dram", self.dram_bytes),
            ("nvme", sum(place.capacity_bytes for place in self.nvme)),
            ("hbm", self.hbm_bytes * self.devices),
        ):
            _require(
                capacity_bytes // self.min_slot_bytes <= _MAX_SLOTS,
                key,
                f"{format_size(capacity_bytes)} in slots of {format_size(self.min_slot_bytes)} are more than "
                f"{_MAX_SLOTS:,}: give less, or raise min_slot",
            )
        _require(len(self.nvme) <= MAX_NVME_PATHS, "nvme", f"at most {MAX_NVME_PATHS} paths")
        paths = [place.path for place in self.nvme]
        _require(len(set(paths)) == len(paths), "nvme", "the same path is given twice")
        for path, other in itertools.permutations(paths, 2):
            _require(
                not path.startswith(f"{other.rstrip('/')}/"),
                "nvme",
                f"{path} lies in {other}; give one beside it",
            )
        _require(0 <= self.nvme_threads <= 64, "nvme_threads", "must be from 0 (probe) to 64")
        _require(
            self.nvme_write_budget_bytes == 0 or self.nvme_write_budget_bytes >= 64 * MIB,
            "nvme_write_budget",
            f"{format_size(self.nvme_write_budget_bytes)} a day is too little: at least 64MiB, or 0 for no bound",
        )
        _require(0 <= self.clean_percent <= 25, "clean_percent", "must be from 0 to 25")
        _require(0 <= self.prefetch_percent <= 90, "prefetch_percent", "must be from 0 to 90")
        _require(1 <= self.devices <= 64, "devices", "must be from 1 to 64")
        _require(1_024 <= self.max_rows < 1 << 31, "max_rows", "must be from 1024 to 2147483647")
        _require(1 <= self.max_sessions <= MAX_SESSIONS, "max_sessions", f"must be from 1 to {MAX_SESSIONS}")
        _require(1 <= self.max_namespaces <= 1 << 20, "max_namespaces", "must be from 1 to 1048576")
        _require(0 <= self.canary_every <= 1 << 30, "canary_every", "must be from 0 (never) to 1073741824")
        _require(self.orphan_ttl_s >= 0, "orphan_ttl", "must not be negative")
        check_tenants(self.tenants)
        nvme_bytes = sum(place.capacity_bytes for place in self.nvme)
        for tier, size_bytes in (
            ("hbm", self.hbm_bytes * self.devices),
            ("dram", self.dram_bytes),
            ("nvme", nvme_bytes),
        ):
            check_reserves(self.tenants, tier, size_bytes)
        _check_endpoints(self.tcp, self.metrics_port)
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            "log_level",
            "is one of debug, info, warning, error",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How a client behaves towards its daemon."""

    timeout_s: float = 5.0
    """Connecting, attaching and each unary call."""
    breaker_failures: int = 3
    """Calls in a row without an answer after which the daemon counts as away."""
    breaker_reset_s: float = 1.0
    """How long the daemon then is not asked."""

    def __post_init__(self) -> None:
        _require(self.timeout_s > 0, "client.timeout", "must be more than 0s")
        _require(self.breaker_failures >= 1, "client.breaker_failures", "must be at least 1")
        _require(self.breaker_reset_s > 0, "client.breaker_reset", "must be more than 0s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What `kvstore worker` and `kvstore generate` run: the bundled engine."""

    model: str = "smollm2"
    """`smollm2`, a Hugging Face folder or a GGUF file; with `load_format` dummy the name of a shape, or a folder."""
    load_format: str = "auto"
    """`auto`: what lies there; `dummy`: random weights of the model's shape, to measure speed without its files."""
    device: str = "auto"
    """`cpu`, `cuda:N`, or `auto`: the first GPU where there is one and the packages for it, else the CPU."""
    attention: str = "triton"
    """Who computes attention on a GPU: `triton`, our own kernels, or `flashinfer` where that is installed."""
    tensor_parallel: int = 1
    """Devices that share the model and each block of its KV, from `device` on."""
    socket: str | None = None
    """Where the worker listens; None: beside the daemon's socket, named by the model."""
    hbm: HbmBudget = HbmBudget(size_bytes=GIB)
    """KV memory of the device (or of its twin), like 8GiB, or a share of what is free there, like 80%."""
    block_tokens: int = 32
    chunk_tokens: int = 0
    """Tokens of one prefill step, over all requests in it; 0: 512 on the CPU, 8192 on a GPU."""
    max_requests: int = 16
    """Requests in one batch."""
    layer_groups: str = "auto"
    """`auto`: a request that is alone and has much to compute begins while its prefix comes from DRAM, layer by layer,
    where that pays; `off`: a load is awaited as a whole. Never in deterministic mode, nor with several devices."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    cache: CacheUse = CacheUse.ON
    """What this worker does with the cache; never more than the service allows."""
    tenant: str | None = None
    """Whose blocks they are: a part of their namespace, so two tenants share none; None: nobody's in particular."""
    load: str = "auto"
    """What is cached below HBM: `auto` is loaded or computed, whichever is sooner, and a tier that harms is not used;
    `always` is loaded; `never` is computed."""
    canary_every: int = 1000
    """Of so many requests with a cached prefix one has a cached block computed again and compared; 0: none. On a GPU in
    deterministic mode alone, never with several devices."""

    def __post_init__(self) -> None:
        power = self.block_tokens
        _require(
            8 <= power <= 1024 and power & (power - 1) == 0, "worker.block_tokens", "is 8, 16, 32, … or 1024"
        )
        _require(
            self.chunk_tokens == 0 or self.chunk_tokens >= self.block_tokens,
            "worker.chunk_tokens",
            "must be at least block_tokens, or 0",
        )
        _require(self.load_format in ("auto", "dummy"), "worker.load_format", "is auto or dummy")
        _require(
            self.device in ("auto", "cpu", "cuda")
            or (self.device.startswith("cuda:") and self.device[5:].isdecimal()),
            "worker.device",
            "is auto, cpu, cuda or cuda:N",
        )
        _require(1 <= self.tensor_parallel <= 64, "worker.tensor_parallel", "must be from 1 to 64")
        _require(self.attention in ("triton", "flashinfer"), "worker.attention", "is triton or flashinfer")
        _require(self.layer_groups in ("auto", "off"), "worker.layer_groups", "is auto or off")
        _require(1 <= self.max_requests <= 4_096, "worker.max_requests", "must be from 1 to 4096")
        _require(self.load in ("auto", "always", "never"), "worker.load", "is auto, always or never")
        _require(0 <= self.canary_every <= 1 << 30, "worker.canary_every", "must be from 0 to 1073741824")
        _require(0 <= self.threads <= 1_024, "worker.threads", "must be from 0 (all cores) to 1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree."""

    serve: ServeConfig
    client: ClientConfig = field(default_factory=ClientConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)


def default_socket(environ: Mapping[str, str], uid: int) -> str:
    """Where the daemon listens if nobody says: below $XDG_RUNTIME_DIR, else in /tmp, in a directory of the user's."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    folder = f"{runtime}/kvstore" if runtime.startswith("/") else f"/tmp/kvstore-{uid}"  # noqa: S108 (made 0700, checked)
    return f"{folder}/kvstore.sock"


def check_socket_path(path: str) -> None:
    """Raises ConfigError for a daemon's socket beside which the sockets for descriptors and admin could not be bound.

    The daemon and its clients ask here, so that neither takes a path that the other cannot reach.
    """
    most, length = _SUN_PATH_BYTES - len(_LONGEST_SUFFIX), len(path.encode(errors="surrogateescape"))
    _require(length <= most, "socket", f"the path is {length} bytes, at most {most}: {path}")


def parse_toml(text: str, name: str) -> Mapping[str, object]:
    """The tables of a configuration file. `name` is what errors call it."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one; so is a number of 5,000 digits
        raise ConfigError(f"{name}: not valid TOML: {error}") from error


def _key(name: str) -> str:
    """The key of a field: its name without the unit."""
    return name.removesuffix("_bytes").removesuffix("_s")


def _check_endpoints(tcp: str | None, metrics_port: int | None) -> None:
    if tcp is not None:
        host, _, port = tcp.rpartition(":")
        _require(
            bool(host) and port.isdecimal(), "tcp", f"{tcp!r} is not host:port, for example 127.0.0.1:7440"
        )
        _require(1 <= int(port) <= 65_535, "tcp", f"port {port} is not from 1 to 65535")
    if metrics_port is not None:
        _require(1 <= metrics_port <= 65_535, "metrics_port", f"{metrics_port} is not from 1 to 65535")
