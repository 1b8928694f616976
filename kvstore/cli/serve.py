"""Run the service: the keeper, the daemon it starts, and the movers of the NVMe paths.

Stays in the foreground and prints one line when it is ready. SIGTERM and ^C bring what is in DRAM to disk and end it;
a second one ends it at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.settings import load_settings
from kvstore.config import ServeConfig
from kvstore.daemon.blackbox import saved_paths
from kvstore.daemon.handover import config_to_toml
from kvstore.daemon.machine import check_disks, check_memory
from kvstore.errors import ConfigError

__all__ = ["keeper_command", "serve"]


_DramPolicy = Annotated[str | None, typer.Option(help="Which blocks of DRAM go first: auto, lru, …")]
_NvmePolicy = Annotated[str | None, typer.Option(help="The same of NVMe.")]
_OrphanTtl = Annotated[str | None, typer.Option(help="How long HBM that no engine maps is kept, like 120s.")]
_Cache = Annotated[str | None, typer.Option(help="How it begins: on, read, write, off or dry-run.")]
_Tenant = Annotated[
    list[str] | None,
    typer.Option(help="A setting of a tenant, like NAME.dram_quota=8GiB; several: again."),
]


def serve(
    *,
    socket: Annotated[str | None, typer.Option(help="Unix socket to listen on.")] = None,
    socket_group: Annotated[str | None, typer.Option(help="Group that may connect too.")] = None,
    tcp: Annotated[str | None, typer.Option(help="host:port to listen on as well.")] = None,
    metrics_port: Annotated[str | None, typer.Option(help="Loopback port of Prometheus metrics.")] = None,
    dram: Annotated[str | None, typer.Option(help="Size of the DRAM tier, like 8GiB.")] = None,
    dram_extent: Annotated[str | None, typer.Option(help="DRAM is taken in pieces of this size.")] = None,
    nvme: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory and size of an NVMe path, like /var/lib/kvstore:100GiB; several with commas or again."
        ),
    ] = None,
    nvme_extent: Annotated[str | None, typer.Option(help="Size of one slab file.")] = None,
    nvme_threads: Annotated[str | None, typer.Option(help="I/O threads of each path; 0 probes.")] = None,
    nvme_write_budget: Annotated[
        str | None, typer.Option(help="Most bytes that each path writes in 24 hours; 0: no bound.")
    ] = None,
    nvme_throttle: Annotated[
        str | None, typer.Option(help="Most that each path moves in a second, like read=1GiB,write=200MiB.")
    ] = None,
    durability: Annotated[
        str | None, typer.Option(help="What disk blocks survive: power, process, none.")
    ] = None,
    recovery: Annotated[str | None, typer.Option(help="Disk blocks at a start: quiet, strict, none.")] = None,
    devices: Annotated[str | None, typer.Option(help="Number of GPUs, or of their twins.")] = None,
    hbm: Annotated[str | None, typer.Option(help="Most HBM of one device, like 64GiB.")] = None,
    min_slot: Annotated[str | None, typer.Option(help="The smallest block expected, like 64KiB.")] = None,
    max_rows: Annotated[str | None, typer.Option(help="Most blocks known at one time.")] = None,
    max_sessions: Annotated[str | None, typer.Option(help="Most engines attached at one time.")] = None,
    max_namespaces: Annotated[
        str | None, typer.Option(help="Most models, adapters, salts, … known at one time.")
    ] = None,
    clean_percent: Annotated[str | None, typer.Option(help="Part of each tier that is kept free.")] = None,
    dram_policy: _DramPolicy = None,
    nvme_policy: _NvmePolicy = None,
    prefetch_percent: Annotated[str | None, typer.Option(help="Most of DRAM for reads ahead of use.")] = None,
    canary_every: Annotated[
        str | None, typer.Option(help="Of so many blocks from DRAM one is checked again; 0: none.")
    ] = None,
    orphan_ttl: _OrphanTtl = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    cache: _Cache = None,
    tenant: _Tenant = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file to read instead of the usual places.")
    ] = None,
) -> None:
    """Run the service in the foreground."""
    flags: dict[str, object] = {**locals()}  # each parameter but these is a setting of that name
    del flags["config"], flags["tenant"]
    flags |= _of_tenants(tenant or [])
    flags["nvme"] = ",".join(nvme) if nvme else None
    settings = load_settings(flags, file=config).config.serve
    check_memory(settings)
    check_disks(settings)
    command = keeper_command(settings)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 (our own interpreter and modules)


def _of_tenants(given: Sequence[str]) -> dict[str, str]:
    """Settings by key. Raises ConfigError."""
    flags = {}
    for text in given:
        key, found, value = text.partition("=")
        if not found or "." not in key:
            raise ConfigError(f"--tenant {text}: write NAME.SETTING=VALUE, like alice.dram_quota=8GiB")
        flags[f"tenants.{key}"] = value
    return flags


def keeper_command(settings: ServeConfig) -> list[str]:
    """What `kvstore serve` becomes: the keeper, and the daemon that it starts."""
    python = sys.executable
    daemon = [python, "-m", "kvstore.daemon", "--config", config_to_toml(settings)]
    saved, _ = saved_paths(settings.socket)
    return [python, "-m", "kvstore.keeper", "--blackbox", saved, "--", *daemon]
