"""`kvstore fsck` as a person calls it, over a path that a service has left."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.units import MIB
from tests.support.command import Done, kvstore
from tests.support.daemon import small_config, started
from tests.support.raw_client import SLOT_BYTES, RawClient
from tiers.nvme.slab import list_slabs

BLOCKS = 40


def fsck(*arguments: str, **environ: str) -> Done:
    return kvstore("fsck", *arguments, COLUMNS="160", **environ)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The folder of a path with blocks, whose service has ended; while it ran nobody could look at it."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=128 * MIB)
        with started(config) as service:
            one = RawClient(service.socket).begin()
            hashes, _ = one.fill(range(4 * BLOCKS))
            one.write_through(hashes)
            refused = fsck(config.nvme[0].path)
            assert refused.returncode == 2
            assert (
                f"is in use by another kvstore daemon or its mover (pid {service.daemon_pid})"
                in refused.stderr
            )
            assert refused.stderr.count("\n") == 1
            assert "stop that service first" in refused.stderr
            one.close()
        yield Path(config.nvme[0].path)


def damage(place: Path) -> None:
    slab = list_slabs(place)[0]
    with (place / slab.name).open("r+b") as file:
        file.seek(3 * (SLOT_BYTES + 4096) + 500)
        file.write(b"not what was written")
    place.chmod(0o755)


def test_a_path_in_order_is_clean(place: Path) -> None:
    done = fsck(str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{BLOCKS} of {BLOCKS} blocks are what was written" in done.stdout


def test_what_is_found_is_told_mended_and_gone(place: Path) -> None:
    damage(place)
    done = fsck(f"{place}:1GiB", "--json")
    assert done.returncode == 1
    (told,) = json.loads(done.stdout)["paths"]
    assert (told["blocks"], told["sound_blocks"], told["left"]) == (BLOCKS, BLOCKS - 1, 2)
    assert {item["trouble"]: item["count"] for item in told["findings"]} == {"mode": 1, "checksum": 1}
    shown = fsck(str(place))
    assert shown.returncode == 1
    assert "the bytes are not those that were written" in shown.stdout
    assert "slab 1 slot 3" in shown.stdout
    assert "2 findings are left; --repair mends" in shown.stdout
    mended = fsck(str(place), "--repair")
    assert (mended.returncode, mended.stderr) == (0, "")
    assert mended.stdout.count("mended") == 2
    assert fsck(str(place)).returncode == 0


def test_what_cannot_be_mended_is_left(place: Path) -> None:
    done = fsck(f"{place}:1MiB", "--repair")
    assert done.returncode == 1
    assert "1 finding is left\n" in done.stdout


def test_the_configured_paths_are_looked_at(place: Path) -> None:
    done = fsck("--json", KVSTORE_NVME=f"{place}:128MiB")
    assert done.returncode == 0
    assert json.loads(done.stdout)["paths"][0]["path"] == str(place)
    none = fsck()
    assert none.returncode == 2
    assert "no path is given, and none is configured" in none.stderr


def test_a_folder_that_is_no_path_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        done = fsck(str(folder))
        assert done.returncode == 2
        assert "is no path of kvstore" in done.stderr
        assert done.stderr.count("\n") == 1
