"""Resolves the configuration: flags before environment before file before defaults, and where each value came from.

Pure: the environment, the file's text and the user id are arguments. A setting is a field of the tree in
`kvstore.config`; its key is the path to it without the unit (`dram`, `limits.call_deadline`), its variable is the key
in capitals after `KVSTORE_`. Field types choose the grammar, so a new field needs nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from kvstore.cache_use import CacheUse
from kvstore.config import (
    Config,
    Durability,
    HbmBudget,
    NvmePath,
    NvmeThrottle,
    Recovery,
    ServeConfig,
    default_socket,
    parse_toml,
)
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.tenant import Tenant
from kvstore.units import parse_duration, parse_size, write_duration, write_size

__all__ = ["Resolved", "Setting", "environment_name", "resolve"]

_PREFIX = "KVSTORE_"
_DEFAULT = "default"
_TENANTS = "tenants."
_RENAMED_DURABILITY = {"commit": "power", "flush": "process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One effective value."""

    key: str
    value: bool | int | float | str | tuple[str, ...] | None
    """In the base unit: bytes, seconds."""
    text: str | tuple[str, ...]
    """As people write it; reads back to the same value. Empty for None."""
    source: str
    """`flag`, `environment KVSTORE_…`, the file's name, or `default`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration and, in the tree's order, where each of its values came from."""

    config: Config
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One place that values come from, by key."""

    label: str
    values: Mapping[str, object]

    def source(self, key: str) -> str:
        return f"environment {environment_name(key)}" if self.label == "environment" else self.label


def resolve(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    uid: int,
    file: str | None = None,
    file_name: str = "kvstore.toml",
) -> Resolved:
    """The effective configuration.

    `flags` are values by key as the command line got them, None where not given; `file` is the text of a TOML file.
    Raises ConfigError for a key that does not exist and for a value that does not parse or is out of range.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    tables = {} if file is None else dict(_flatten(parse_toml(file, file_name)))
    tenants = tuple(Tenant(name=name) for name in _tenant_names((*given, *tables)))
    defaults = Config(serve=ServeConfig(socket=default_socket(environ, uid), tenants=tenants))
    keys = dict(_walk(defaults))
    layers = (
        _Layer(label="flag", values=given),
        _Layer(label="environment", values=_from_environment(environ, keys)),
        _Layer(label=file_name, values=tables),
    )
    for layer in layers:
        _refuse_unknown(layer, keys)
    sources = {
        key: next((layer.source(key) for layer in layers if key in layer.values), _DEFAULT) for key in keys
    }
    try:
        config = _build(defaults, layers)
    except ConfigError as error:
        source = sources.get(error.message.partition(": ")[0], _DEFAULT)
        raise error if source == _DEFAULT else ConfigError(f"{source}: {error.message}") from None
    settings = tuple(
        Setting(key=key, value=_plain(value), text=_text(key_field, value), source=sources[key])
        for key, (key_field, value) in _walk(config)
    )
    return Resolved(config=config, settings=settings)


def environment_name(key: str) -> str:
    """The variable of a key: `limits.call_deadline` is `KVSTORE_LIMITS_CALL_DEADLINE`."""
    return _PREFIX + key.upper().replace(".", "_")


def _tenant_names(keys: Iterable[str]) -> Iterator[str]:
    """The NAME of each `tenants.NAME.SETTING`, and of `tenants.NAME`, which is a table without settings; each once."""
    of_tenants = (key.removeprefix(_TENANTS) for key in keys if key.startswith(_TENANTS))
    yield from dict.fromkeys(rest.rpartition(".")[0] or rest for rest in of_tenants)


def _walk(record: object, prefix: str = "") -> Iterator[tuple[str, tuple[str, object]]]:
    """(key, (field name, value)) of each leaf; the daemon's own settings stand at the top of the tree."""
    assert is_dataclass(record)
    for item in fields(record):
        value: object = getattr(record, item.name)
        if item.name == "tenants" and isinstance(value, tuple):
            for tenant in value:
                yield from _walk(tenant, f"{_TENANTS}{tenant.name}.")
        elif isinstance(record, Tenant) and item.name == "name":
            continue  # it stands in the key
        elif is_dataclass(value) and not isinstance(value, HbmBudget | NvmeThrottle):
            yield from _walk(value, "" if item.name == "serve" else f"{prefix}{item.name}.")
        else:
            yield prefix + _bare(item.name), (item.name, value)


def _bare(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_s")


def _build(defaults: Config, layers: Sequence[_Layer]) -> Config:
    limits = replace(defaults.serve.limits, **_changes(defaults.serve.limits, "limits.", layers))
    tenants = tuple(
        replace(tenant, **_changes(tenant, f"{_TENANTS}{tenant.name}.", layers))
        for tenant in defaults.serve.tenants
    )
    changes = _changes(defaults.serve, "", layers)
    return Config(
        serve=replace(defaults.serve, limits=limits, tenants=tenants, **changes),
        client=replace(defaults.client, **_changes(defaults.client, "client.", layers)),
        worker=replace(defaults.worker, **_changes(defaults.worker, "worker.", layers)),
    )


def _changes(record: object, prefix: str, layers: Sequence[_Layer]) -> dict[str, Any]:
    """Field → parsed value of each leaf of `record` that a layer gives; the first layer that has a key wins."""
    assert is_dataclass(record)
    changes = {}
    for item in fields(record):
        key = prefix + _bare(item.name)
        layer = next((layer for layer in layers if key in layer.values), None)
        if layer is None:
            continue
        try:
            changes[item.name] = _parse(item.name, str(item.type), layer.values[key])
        except ConfigError as error:
            raise ConfigError(f"{layer.source(key)}: {error.message}") from None
        except InvalidArgument as error:
            raise ConfigError(f"{layer.source(key)}: {key}: {error.message}") from None
    return changes


def _parse(name: str, type_name: str, raw: object) -> object:
    """`raw`, from whatever layer, as the type of its field. The unit in the field's name chooses size or duration."""
    if name.endswith("_bytes"):
        return parse_size(str(raw)) if _is(raw, str, int) else _wrong(raw, "a size like 8GiB")
    if name.endswith("_s"):
        return parse_duration(str(raw)) if _is(raw, str, int, float) else _wrong(raw, "a duration like 120s")
    return _PARSERS[type_name.removesuffix(" | None")](raw)


def _integer(raw: object) -> int:
    text = str(raw).replace("_", "").replace(",", "")
    if not _is(raw, str, int) or not text.removeprefix("-").isdecimal():
        _wrong(raw, "a whole number")
    return int(text)


def _string(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        _wrong(raw, "a text that is not empty")
    return str(raw)


def _recovery(raw: object) -> Recovery:
    try:
        return Recovery(raw)
    except ValueError:
        _wrong(raw, "one of " + ", ".join(choice.value for choice in Recovery))


def _durability(raw: object) -> Durability:
    try:
        return Durability(raw)
    except ValueError:
        renamed = _RENAMED_DURABILITY.get(str(raw))
        hint = f"; {raw} is called {renamed} now" if renamed else ""
        _wrong(raw, "one of " + ", ".join(choice.value for choice in Durability) + hint)


def _cache_use(raw: object) -> CacheUse:
    try:
        return CacheUse(raw)
    except ValueError:
        _wrong(raw, "one of " + ", ".join(choice.value for choice in CacheUse))


def _hbm_budget(raw: object) -> HbmBudget:
    """`8GiB`, or `80%` of what is free."""
    if not _is(raw, str, int):
        _wrong(raw, "a size like 8GiB, or a share of what is free like 80%")
    text = str(raw).strip()
    if not text.endswith("%"):
        return HbmBudget(size_bytes=parse_size(text))
    share = text[:-1].strip()
    if not share.isdecimal() or not 1 <= int(share) <= 100:
        _wrong(raw, "a share of what is free, from 1% to 100%")
    return HbmBudget(share_percent=int(share))


def _nvme(raw: object) -> tuple[NvmePath, ...]:
    """`["/path:100GiB", …]`, or with commas in one text."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        _wrong(raw, "a list of path:size, like /var/lib/kvstore:100GiB")
    return tuple(_nvme_path(item) for item in items)


def _nvme_path(item: object) -> NvmePath:
    path, _, capacity = item.strip().rpartition(":") if isinstance(item, str) else ("", "", "")
    if not path:
        _wrong(item, "path:size, like /var/lib/kvstore:100GiB")
    if any(_is_size(text) for text in re.findall(r":([^:,]+),", path)):  # a second path:size in the same text
        _wrong(item, "one path:size; give each path as an item of its own")
    return NvmePath(path=path, capacity_bytes=parse_size(capacity))


def _nvme_throttle(raw: object) -> NvmeThrottle:
    """`read=1GiB,write=200MiB,read_ops=5000,write_ops=1000`, each at most once, in any order."""
    if not isinstance(raw, str) or not raw.strip():
        _wrong(raw, _THROTTLE_WANTED)
    given: dict[str, int] = {}
    for item in raw.split(","):
        name, _, amount = (part.strip() for part in item.partition("="))
        field = _THROTTLE_FIELDS.get(name)
        if field is None or field in given or not amount:
            _wrong(item.strip(), _THROTTLE_WANTED)
        given[field] = parse_size(amount) if field.endswith("bytes_per_s") else _integer(amount)
    if not any(given.values()):
        _wrong(raw, _THROTTLE_WANTED)
    return NvmeThrottle(**given)


def _is_size(text: str) -> bool:
    try:
        parse_size(text)
    except InvalidArgument:
        return False
    return True


_THROTTLE_WANTED = "a list of bounds a second, like read=1GiB,write=200MiB,read_ops=5000,write_ops=1000"
_THROTTLE_FIELDS = {
    "read": "read_bytes_per_s",
    "write": "write_bytes_per_s",
    "read_ops": "read_operations_per_s",
    "write_ops": "write_operations_per_s",
}
_PARSERS: Mapping[str, Callable[[object], object]] = {
    "int": _integer,
    "str": _string,
    "CacheUse": _cache_use,
    "Durability": _durability,
    "Recovery": _recovery,
    "HbmBudget": _hbm_budget,
    "NvmeThrottle": _nvme_throttle,
    "tuple[NvmePath, ...]": _nvme,
}


def _is(raw: object, *types: type) -> bool:
    """Whether `raw` is of one of `types`; a bool counts as no int."""
    return isinstance(raw, types) and not isinstance(raw, bool)


def _wrong(raw: object, wanted: str) -> NoReturn:
    raise InvalidArgument(f"{raw!r} is not {wanted}")


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and (value or prefix != _TENANTS):  # a tenant is one without settings, too
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _from_environment(environ: Mapping[str, str], keys: Mapping[str, object]) -> dict[str, object]:
    """Values by key; an empty variable counts as not set.

    A variable that is nearly one of ours is refused; others with our prefix (KVSTORE_DEBUG, …) are not settings.
    """
    names = {environment_name(key): key for key in keys}
    for name in environ:
        if name.startswith(_PREFIX) and name not in names:
            close = get_close_matches(name, names, n=1, cutoff=0.85)
            if close:
                raise ConfigError(f"environment {name}: no such setting; did you mean {close[0]}?")
    return {key: environ[name] for name, key in names.items() if environ.get(name)}


def _refuse_unknown(layer: _Layer, keys: Mapping[str, object]) -> None:
    for key, value in layer.values.items():
        if key not in keys and not (key.startswith(_TENANTS) and value == {}):
            close = get_close_matches(key, keys, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`kvstore config` lists what there is"
            raise ConfigError(f"{layer.label}: unknown key {key!r}; {hint}")


def _plain(value: object) -> bool | int | float | str | tuple[str, ...] | None:
    if isinstance(value, CacheUse | Durability | Recovery):
        return str(value.value)
    if isinstance(value, HbmBudget):
        return value.size_bytes or str(value)
    if isinstance(value, NvmeThrottle):
        return str(value)
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def _text(name: str, value: object) -> str | tuple[str, ...]:
    """`value` as people write it; it reads back to the same."""
    if isinstance(value, HbmBudget):
        return str(value)
    plain = _plain(value)
    if isinstance(plain, tuple):
        return plain
    if plain is None:
        return ""
    if name.endswith("_bytes") and isinstance(plain, int):
        return write_size(plain)
    if name.endswith("_s") and isinstance(plain, float):
        return write_duration(plain)
    return str(plain)
