"""The configuration on its way from the command line to the daemon: TOML text that gives back the same record."""

from __future__ import annotations

import json
from dataclasses import fields

from kvstore.cache_use import CacheUse
from kvstore.config import Durability, Limits, NvmeThrottle, Recovery, ServeConfig
from kvstore.settings import resolve
from kvstore.tenant import Tenant

__all__ = ["config_from_toml", "config_to_toml"]


def config_to_toml(config: ServeConfig) -> str:
    """`config` as a configuration file; what has no value is left out."""
    lines = [*_lines(config), "", "[limits]", *_lines(config.limits)]
    for tenant in config.tenants:
        lines += ["", f"[tenants.{json.dumps(tenant.name)}]", *_lines(tenant)]
    return "\n".join(lines) + "\n"


def _lines(record: ServeConfig | Limits | Tenant) -> list[str]:
    lines = []
    for field in fields(record):
        value = getattr(record, field.name)
        in_key = isinstance(record, Tenant) and field.name == "name"
        if value is None or isinstance(value, Limits) or field.name == "tenants" or in_key:
            continue
        key = field.name.removesuffix("_bytes").removesuffix("_s")
        lines.append(f"{key} = {_literal(value)}")
    return lines


def _literal(value: object) -> str:
    """TOML's strings and lists of strings are JSON's."""
    if isinstance(value, CacheUse | Durability | Recovery):
        return json.dumps(value.value)
    if isinstance(value, NvmeThrottle):
        return json.dumps(str(value))
    if isinstance(value, tuple):
        return json.dumps([f"{item.path}:{item.capacity_bytes}" for item in value])
    return json.dumps(value)


def config_from_toml(text: str) -> ServeConfig:
    """The configuration in `text` alone: no flag and no environment joins in. Raises ConfigError."""
    return resolve(flags={}, environ={}, uid=0, file=text, file_name="configuration").config.serve
