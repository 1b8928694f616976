"""The commands that look at a service: status, explain, release, and what `serve` says to bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from kvstore.cli.status import _render
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.conftest import MemberProcess
from tests.support.command import Done, kvstore
from tests.support.daemon import Service, wait_for
from tests.support.raw_client import RawClient, namespace_parts

Make = Callable[[], RawClient]


def run(*arguments: str) -> Done:
    """`kvstore` with these arguments, on a terminal of 80 columns."""
    return kvstore(*arguments, COLUMNS="80")


def test_status_shows_what_stats_says(client: Make, service: Service) -> None:
    one = client().begin()
    one.fill(range(40))
    shown = run("status", "--socket", service.socket)
    assert shown.returncode == 0, shown.stderr
    assert "ready" in shown.stdout
    assert "raw" in shown.stdout
    assert "…" not in shown.stdout, "nothing is cut on 80 columns"
    machine = json.loads(run("status", "--socket", service.socket, "--json").stdout)
    assert machine["pid"] == service.daemon_pid
    hbm = next(tier for tier in machine["tiers"] if tier["tier"] == "hbm")
    assert (hbm["sealed_slots"], hbm["held_slots"]) == (10, 10)
    assert machine["sessions"][0]["name"] == "raw"
    assert machine["warnings"] == []
    assert (machine["moves_in_flight"], machine["queued_reads"], machine["queued_writes"]) == (0, 0, 0)


def test_status_shows_moves_under_way() -> None:
    """What movers were at was counted and shown nowhere."""
    described = pb.DescribeReply(version="1", pid=7)
    stats = pb.StatsReply(ready=True, moves_in_flight=1200, queued_writes=7)
    console = Console(file=io.StringIO(), width=200)
    console.print(_render(described, stats, every_counter=False))
    assert isinstance(console.file, io.StringIO)
    assert "1,200 moves under way, 0 reads and 7 writes wait" in console.file.getvalue()


def test_explain_names_the_first_missing_block(client: Make, service: Service, tmp_path: Path) -> None:
    one = client().begin()
    one.fill(range(40))
    parts = {part.tag: part.value.decode() for part in namespace_parts()}
    (tmp_path / "ns.json").write_text(json.dumps({**parts, "model": {"hex": b"m".hex()}}))
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(48))))
    files = ("--namespace", str(tmp_path / "ns.json"), "--tokens", str(tmp_path / "tokens.json"))
    told = json.loads(run("explain", *files, "--json", "--socket", service.socket).stdout)
    assert told["cached_blocks"] == 10
    assert told["cached_tokens"] == 40
    assert told["cause"] == "never stored"
    shown = run("explain", *files, "--socket", service.socket)
    assert "block 10: never stored" in shown.stdout
    wait_for("no session of the command", lambda: len(service.stats().sessions) == 1)


def test_explain_says_what_is_wrong_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "ns.json").write_text('{"block_tokens": "four"}')
    (tmp_path / "tokens.json").write_text("[1, 2")
    for namespace, tokens, says in (
        ("none.json", "tokens.json", "cannot read"),
        ("ns.json", "tokens.json", "is not JSON"),
    ):
        done = run("explain", "--namespace", str(tmp_path / namespace), "--tokens", str(tmp_path / tokens))
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_release_lets_orphans_go(
    client: Make, member: Callable[..., MemberProcess], service: Service
) -> None:
    worker = member()
    done = run("release", "--socket", service.socket)
    assert "stay: a live engine maps them" in done.stdout
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    done = run("release", "--gpu", "0", "--json", "--socket", service.socket)
    assert json.loads(done.stdout) == {"released_bytes": 64 * 16_384, "kept_bytes": 0}


def test_serve_refuses_in_one_line(service: Service) -> None:
    for arguments, says in (
        (("--dram", "lots"), "is no size"),
        (("--dram", "1KiB"), "dram"),
        (("--nvme", "/none/such/place:1GiB"), "does not exist"),
        (("--nvme", "100GiB"), "path:size"),
        (("--socket", "relative.sock"), "absolute"),
    ):
        done = run("serve", *arguments)
        assert done.returncode != 0, arguments
        assert says in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_keeper_says_in_one_line_that_its_socket_is_in_use(service: Service) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", service.socket]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "socket in use" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_describe_gives_the_configuration_back(service: Service) -> None:
    from kvstore.daemon.handover import config_from_toml

    reply = service.call("Describe", pb.DescribeRequest())
    assert isinstance(reply, pb.DescribeReply)
    assert config_from_toml(reply.config_toml) == service.config
