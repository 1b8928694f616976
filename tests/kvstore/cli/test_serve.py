"""What `kvstore serve` says before it becomes the keeper: bad input is one line, and nothing is made."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from kvstore.cli.serve import serve as serve_command
from kvstore.config import NvmePath, ServeConfig
from kvstore.daemon.machine import check_disks, memory_bytes
from kvstore.errors import ConfigError
from kvstore.settings import resolve
from kvstore.units import GIB, MIB
from tests.support.command import kvstore


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--dram", "1PiB", "--min-slot", "1MiB"], "dram: 1PiB is more than the "),
        (["--dram", "4096PiB"], "dram: 4096PiB in slots of 64KiB are more than 4,294,967,294"),
        (
            ["--nvme", "/tmp/kv-a:1PiB", "--min-slot", "1MiB"],
            "nvme: 1PiB is configured on the disk of /tmp/kv-a",
        ),
        (["--nvme", "/tmp/kv-a:4096PiB"], "nvme: 4096PiB in slots of 64KiB are more than"),
        (["--hbm", "4096PiB"], "hbm: 4096PiB in slots of 64KiB are more than"),
        (["--nvme", "/no/where/a:1GiB,/no/where/b:1GiB"], "nvme: the folder /no/where does not exist"),
        (["--nvme", "/tmp/kv-a,/tmp/kv-b:1GiB"], "flag: nvme: '/tmp/kv-a' is not path:size"),
        (["--dram-extent", "1KiB"], "flag: dram_extent: must be at least 4KiB"),
        (["--min-slot", "5000"], "flag: min_slot: must be a multiple of 4KiB"),
        (["--nvme-extent", "x"], "flag: nvme_extent: 'x' is no size"),
        (["--nvme-write-budget", "1MiB"], "flag: nvme_write_budget: 1MiB a day is too little"),
        (["--nvme-throttle", "much"], "flag: nvme_throttle: 'much' is not a list of bounds"),
        (["--clean-percent", "90"], "flag: clean_percent: must be from 0 to 25"),
        (["--canary-every", "-1"], "flag: canary_every: must be from 0"),
        (["--nvme-threads", "65"], "flag: nvme_threads: must be from 0 (probe) to 64"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: list[str], problem: str) -> None:
    """Sizes beyond the machine were found out late or in the terms of the tables; some settings had no flag."""
    done = kvstore("serve", "--socket", str(tmp_path / "k.sock"), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())
    assert not Path("/tmp/kv-a").exists()


def test_each_setting_of_the_service_has_a_flag() -> None:
    """The documentation said that every setting had a flag, and five of the service had none."""
    keys = {setting.key for setting in resolve(flags={}, environ={}, uid=0).settings}
    own = {key for key in keys if "." not in key}
    assert own <= inspect.signature(serve_command).parameters.keys()


def config(**changes: object) -> ServeConfig:
    return ServeConfig(socket="/tmp/k.sock", **changes)  # type: ignore[arg-type]


def test_two_paths_on_one_disk_are_added_up(tmp_path: Path) -> None:
    """Each path alone fitted on the disk that both were on."""
    disk = os.statvfs(tmp_path)
    half = disk.f_blocks * disk.f_frsize // 2 + MIB
    paths = tuple(NvmePath(path=str(tmp_path / name), capacity_bytes=half) for name in ("a", "b"))
    check_disks(config(nvme=paths[:1]))
    with pytest.raises(ConfigError, match="in all: give less"):
        check_disks(config(nvme=paths))


def fake_machine(folder: Path, limits: dict[str, str]) -> tuple[Path, Path]:
    """A /proc of a machine of 8 GiB, and cgroups with these files."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:  {8 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text("5:cpu:/x\n4:memory:/old/group\n0::/system.slice/kv.service\n")
    for name, text in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


@pytest.mark.parametrize(
    "limits, most",
    [
        ({}, 8 * GIB),
        ({"memory.max": "max\n"}, 8 * GIB),
        ({"memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"memory.max": "max\n", "system.slice/memory.max": f"{GIB}\n"}, GIB),
        ({"system.slice/memory.max": f"{2 * GIB}\n", "system.slice/kv.service/memory.max": f"{GIB}\n"}, GIB),
        ({"system.slice/memory.max": f"{GIB}\n", "system.slice/kv.service/memory.max": f"{2 * GIB}\n"}, GIB),
        ({"memory/memory.limit_in_bytes": f"{1 << 63}\n"}, 8 * GIB),
        ({"memory/old/group/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3 * GIB),
    ],
    ids=["none", "unlimited", "container", "slice", "service", "narrower-slice", "old-unlimited", "old"],
)
def test_memory_is_that_of_the_narrowest_bound(tmp_path: Path, limits: dict[str, str], most: int) -> None:
    assert memory_bytes(*fake_machine(tmp_path, limits)) == most


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path) is None
