"""Flags before environment before file before defaults; every fault is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from kvstore.cache_use import CacheUse
from kvstore.config import (
    ClientConfig,
    Durability,
    HbmBudget,
    Limits,
    NvmePath,
    NvmeThrottle,
    ServeConfig,
    WorkerConfig,
    default_socket,
)
from kvstore.daemon.handover import config_from_toml, config_to_toml
from kvstore.errors import ConfigError
from kvstore.settings import Resolved, environment_name, resolve
from kvstore.tenant import Tenant
from kvstore.units import GIB, MIB


def settle(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Resolved:
    return resolve(flags=flags or {}, environ=environ or {}, uid=1000, file=file, file_name="k.toml")


def source(resolved: Resolved, key: str) -> str:
    return next(item.source for item in resolved.settings if item.key == key)


def test_precedence() -> None:
    file = 'dram = "3GiB"\nmax_sessions = 3\nmax_rows = 3000\n'
    environ = {"KVSTORE_DRAM": "2GiB", "KVSTORE_MAX_SESSIONS": "2"}
    resolved = settle({"dram": "1GiB", "max_sessions": None}, environ, file)
    serve = resolved.config.serve
    assert (serve.dram_bytes, serve.max_sessions, serve.max_rows) == (GIB, 2, 3000)
    assert source(resolved, "dram") == "flag"
    assert source(resolved, "max_sessions") == "environment KVSTORE_MAX_SESSIONS"
    assert source(resolved, "max_rows") == "k.toml"
    assert source(resolved, "orphan_ttl") == "default"


def test_every_kind_of_value() -> None:
    config = settle(
        {"nvme": ["/a:1GiB", "/b:100G"]},
        {"KVSTORE_DURABILITY": "process", "KVSTORE_METRICS_PORT": "9100", "KVSTORE_TCP": "[::1]:7440"},
        'orphan_ttl = "2m"\n[limits]\nmessage = 1048576\ncall_deadline = 2\n[client]\ntimeout = "250ms"\n'
        '[worker]\nmodel = "/models/x"\n',
    ).config
    assert config.serve.nvme == (
        NvmePath(path="/a", capacity_bytes=GIB),
        NvmePath(path="/b", capacity_bytes=100 * 10**9),
    )
    assert config.serve.durability is Durability.PROCESS
    assert (config.serve.metrics_port, config.serve.tcp, config.serve.orphan_ttl_s) == (
        9100,
        "[::1]:7440",
        120.0,
    )
    assert (config.serve.limits.message_bytes, config.serve.limits.call_deadline_s) == (MIB, 2.0)
    assert (config.client.timeout_s, config.worker.model) == (0.25, "/models/x")


def test_a_path_with_a_comma_can_stand_in_the_file() -> None:
    config = settle(file='nvme = ["/a:b,c:1GiB"]').config
    assert [place.path for place in config.serve.nvme] == ["/a:b,c"]


def test_nvme_in_one_text_and_an_empty_variable() -> None:
    config = settle(environ={"KVSTORE_NVME": "/a:1GiB, /with:colon:1GiB", "KVSTORE_DRAM": ""}).config
    assert [place.path for place in config.serve.nvme] == ["/a", "/with:colon"]
    assert config.serve.dram_bytes == settle().config.serve.dram_bytes


@pytest.mark.parametrize(
    "kind,given,line",
    [
        (
            "flags",
            {"dram": "8Gix"},
            "flag: dram: unknown unit 'Gix' in size '8Gix': write it like 8GiB, 512MiB or 100G",
        ),
        (
            "flags",
            {"dram": "1MiB"},
            "flag: dram: 1MiB is less than one extent (64MiB): give more, or lower dram_extent",
        ),
        ("flags", {"max_sessions": "90"}, "flag: max_sessions: must be from 1 to 48"),
        (
            "flags",
            {"worker.load_format": "random"},
            "flag: worker.load_format: is auto or dummy",
        ),
        (
            "flags",
            {"worker.device": "cuda:first"},
            "flag: worker.device: is auto, cpu, cuda or cuda:N",
        ),
        (
            "flags",
            {"worker.chunk_tokens": "8"},
            "flag: worker.chunk_tokens: must be at least block_tokens, or 0",
        ),
        ("flags", {"max_sessions": "many"}, "flag: max_sessions: 'many' is not a whole number"),
        ("flags", {"dramm": "1GiB"}, "flag: unknown key 'dramm'; did you mean 'dram'?"),
        ("flags", {"tcp": "7440"}, "flag: tcp: '7440' is not host:port, for example 127.0.0.1:7440"),
        ("flags", {"nvme": ["/a:1GiB", "/a:2GiB"]}, "flag: nvme: the same path is given twice"),
        (
            "flags",
            {"nvme": ["/a/b:1GiB", "/ab:1GiB", "/a:2GiB"]},
            "flag: nvme: /a/b lies in /a; give one beside it",
        ),
        ("flags", {"nvme": ["a:1GiB"]}, "flag: nvme: the path 'a' must be absolute"),
        ("flags", {"nvme": ["/a:1MiB"]}, "flag: nvme: 1MiB for /a is too little: at least 64MiB"),
        ("environ", {"KVSTORE_NVME": "/a"}, "environment KVSTORE_NVME: nvme: '/a' is not path:size, like "),
        (
            "environ",
            {"KVSTORE_DRAMM": "1GiB"},
            "environment KVSTORE_DRAMM: no such setting; did you mean KVSTORE_DRAM?",
        ),
        ("environ", {"KVSTORE_SOCKET": "s" * 200}, "environment KVSTORE_SOCKET: socket: "),
        ("environ", {"KVSTORE_SOCKET": "/" + "s" * 110}, "environment KVSTORE_SOCKET: socket: "),
        ("file", "dram = true", "k.toml: dram: True is not a size like 8GiB"),
        ("file", "dram =", "k.toml: not valid TOML: "),
        ("file", "orphan_ttl = []", "k.toml: orphan_ttl: [] is not a duration like 120s"),
        ("file", 'durability = "never"', "k.toml: durability: 'never' is not one of none, process, power"),
        (
            "file",
            'durability = "commit"',
            "k.toml: durability: 'commit' is not one of none, process, power; commit is called power now",
        ),
        (
            "flags",
            {"durability": "flush"},
            "flag: durability: 'flush' is not one of none, process, power; flush is",
        ),
        ("file", "[limits]\ncall_deadlin = 3", "k.toml: unknown key 'limits.call_deadlin'; did you mean "),
        ("file", "[limits]\ncall_deadline = 0", "k.toml: limits.call_deadline: must be more than 0s"),
        ("file", "qqqq = 3", "k.toml: unknown key 'qqqq'; `kvstore config` lists what there is"),
        (
            "file",
            'nvme = ["/a:1GiB,/b:1GiB"]',
            "k.toml: nvme: '/a:1GiB,/b:1GiB' is not one path:size; give each path as an item of its own",
        ),
        ("file", "nvme = [3]", "k.toml: nvme: 3 is not path:size"),
    ],
)
def test_a_fault_is_one_line_that_says_where_and_what_to_do(kind: str, given: object, line: str) -> None:
    arguments: dict[str, object] = {"flags": {}, "environ": {}, "uid": 0, "file_name": "k.toml", kind: given}
    with pytest.raises(ConfigError) as caught:
        resolve(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_variable_that_is_nobodys_is_left_alone() -> None:
    settle(environ={"KVSTORE_DEBUG": "1", "KVSTORE_CONFIG": "/x", "KVSTORE_FAULT": "seal.commit"})


@pytest.mark.parametrize("record", [ServeConfig, Limits, ClientConfig, WorkerConfig])
def test_each_field_can_be_given(record: type) -> None:
    """Elsewhere a field was added to the configuration and no flag, variable or file could ever set it."""
    prefix = {ServeConfig: "", Limits: "limits.", ClientConfig: "client.", WorkerConfig: "worker."}[record]
    shown = {item.key: item for item in settle().settings}
    for field in dataclasses.fields(record):
        if field.name in ("limits", "tenants"):  # records of their own
            continue
        key = prefix + field.name.removesuffix("_bytes").removesuffix("_s")
        item = shown[key]
        given_texts = {
            "nvme": "/a:1GiB",
            "nvme_throttle": "read=1GiB",
            "tcp": "127.0.0.1:1",
            "socket_group": "kv",
            "worker.socket": "/s",
            "worker.tenant": "alice",
        }
        text = given_texts.get(key, item.text)
        given = settle(environ={environment_name(key): str(text) or "1"})
        assert source(given, key) == f"environment {environment_name(key)}"
        if item.value not in (None, ()):
            assert given.config == settle().config


def test_tenants_are_tables_of_any_name() -> None:
    file = """
        dram = "4GiB"
        [tenants.alice]
        dram_quota = "2GiB"
        dram_reserve = "1GiB"
        [tenants."a.b c"]
        cache = "dry-run"
        [tenants.bob]
        [tenants."*"]
        dram_quota = "1GiB"
    """
    resolved = settle({"tenants.alice.dram_quota": "3GiB", "tenants.eve.cache": "off"}, file=file)
    by_name = {tenant.name: tenant for tenant in resolved.config.serve.tenants}
    assert by_name == {
        "alice": Tenant(name="alice", dram_quota_bytes=3 * GIB, dram_reserve_bytes=GIB),
        "a.b c": Tenant(name="a.b c", cache=CacheUse.DRY_RUN),
        "bob": Tenant(name="bob"),
        "*": Tenant(name="*", dram_quota_bytes=GIB),
        "eve": Tenant(name="eve", cache=CacheUse.OFF),
    }
    assert source(resolved, "tenants.alice.dram_quota") == "flag"
    assert source(resolved, "tenants.alice.dram_reserve") == "k.toml"
    handed = config_from_toml(config_to_toml(resolved.config.serve))
    assert handed == resolved.config.serve, "the daemon gets what the command line read"


@pytest.mark.parametrize(
    "file, line",
    [
        ('[tenants.a]\ndram_quotta = "1GiB"', "k.toml: unknown key 'tenants.a.dram_quotta'; did you mean"),
        ('[tenants.a]\nname = "b"', "k.toml: unknown key 'tenants.a.name'"),
        ("tenants = 3", "k.toml: unknown key 'tenants'"),
        (
            '[tenants.a]\ncache = "never"',
            "k.toml: tenants.a.cache: 'never' is not one of on, read, write, off",
        ),
        (
            '[tenants.a]\ndram_quota = "1GiB"\ndram_reserve = "2GiB"',
            "k.toml: tenants.a.dram_reserve: 2GiB is more than the quota of 1GiB",
        ),
        (
            '[tenants.a]\ndram_reserve = "1GiB"\n[tenants.b]\ndram_reserve = "1536MiB"',
            "dram: its 2GiB are less than the 2.5GiB that tenants have reserved",
        ),
        ('[tenants.a]\nnvme_reserve = "1GiB"', "nvme: its 0B are less than the 1GiB"),
        ('[tenants."a\\nb"]\ncache = "off"', "tenants: 'a\\nb' is no name"),
    ],
)
def test_a_wrong_tenant_is_refused_in_one_line(file: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settle(file=file)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_default_socket_belongs_to_the_user() -> None:
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == "/run/user/7/kvstore/kvstore.sock"
    assert default_socket({"XDG_RUNTIME_DIR": "relative"}, 7) == "/tmp/kvstore-7/kvstore.sock"


@pytest.mark.parametrize(
    "given, budget, text",
    [
        ("8GiB", HbmBudget(size_bytes=8 * GIB), "8GiB"),
        ("80%", HbmBudget(share_percent=80), "80%"),
        (" 100 % ", HbmBudget(share_percent=100), "100%"),
        (2 * GIB, HbmBudget(size_bytes=2 * GIB), "2GiB"),
    ],
)
def test_a_workers_hbm_is_a_size_or_a_share(given: object, budget: HbmBudget, text: str) -> None:
    resolved = settle({"worker.hbm": given})
    assert resolved.config.worker.hbm == budget
    (setting,) = [item for item in resolved.settings if item.key == "worker.hbm"]
    assert setting.text == text
    assert settle({"worker.hbm": setting.text}).config.worker.hbm == budget


@pytest.mark.parametrize("given", ["0%", "101%", "8.5%", "-1%", "%", "80percent", "64KiB", True, ""])
def test_no_other_hbm_is_taken(given: object) -> None:
    with pytest.raises(ConfigError, match="hbm"):
        settle(file=f"[worker]\nhbm = {str(given).lower() if given is True else repr(given)}")


def test_a_share_is_of_what_is_free() -> None:
    assert HbmBudget(share_percent=80).of(100 * GIB) == 80 * GIB
    assert HbmBudget(size_bytes=GIB).of(0) == GIB


def test_a_throttle_names_what_it_bounds() -> None:
    resolved = settle({"nvme_throttle": "write_ops=1_000, read=1GiB"})
    assert resolved.config.serve.nvme_throttle == NvmeThrottle(
        read_bytes_per_s=1 << 30, write_operations_per_s=1000
    )
    (setting,) = [item for item in resolved.settings if item.key == "nvme_throttle"]
    assert setting.text == "read=1GiB,write_ops=1000"
    assert settle({"nvme_throttle": setting.text}).config == resolved.config
    assert config_from_toml(config_to_toml(resolved.config.serve)) == resolved.config.serve


@pytest.mark.parametrize(
    "given", ["", "1GiB", "read", "read=", "read=1GiB,read=2GiB", "erase=1GiB", "read=0", "read_ops=-1"]
)
def test_no_other_throttle_is_taken(given: str) -> None:
    with pytest.raises(ConfigError, match="nvme_throttle"):
        settle(file=f"nvme_throttle = {given!r}")
