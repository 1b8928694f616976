"""What blocks on disk survive, by `durability`, and what a start does with them, by `recovery`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.config import Durability, Recovery, ServeConfig
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.test_commands import run
from tests.kvstore.daemon.test_nvme import Written, filled, kill_all, read_back, store
from tests.support.daemon import DEADLINE_S, Service, small_config, start, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient
from tiers.nvme.slab import list_slabs

HIT_DRAM, MISS = pb.OUTCOME_HIT_DRAM, pb.OUTCOME_MISS


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def config_of(place: Path, **changes: object) -> ServeConfig:
    return replace(small_config(place, nvme_bytes=128 * MIB), **changes)  # type: ignore[arg-type]


def on_disk(service: Service) -> int:
    return service.tier("nvme").sealed_slots


def disk_blocks(config: ServeConfig) -> int:
    """What the next service finds."""
    with started(config) as service:
        return on_disk(service)


@pytest.mark.parametrize(
    "durability, left", [("none", 0), ("process", 20), ("power", 20)], ids=["none", "process", "power"]
)
def test_what_blocks_survive(place: Path, durability: str, left: int) -> None:
    """kill -9 of the daemon costs nothing in any mode; without the memory that knew them, `none` has no blocks."""
    config = config_of(place, durability=Durability(durability))
    with started(config) as service:
        one, _ = store(service, range(80))
        service.kill_daemon()
        wait_for("a mover", service.mover_pids)
        assert on_disk(service) == 20
        one.close()
        kill_all(service)
    assert (place / "nvme" / "index").exists() == (durability != "none")
    assert disk_blocks(config) == left


def test_without_durability_an_end_in_order_leaves_nothing(place: Path) -> None:
    config = config_of(place, durability=Durability.NONE)
    filled(config)
    assert disk_blocks(config) == 0


def test_no_durability_does_not_delete_what_another_has_kept(place: Path, written: Written) -> None:
    """A start with `--durability none` over the slabs of another durability deleted every one of them at once."""
    config = config_of(place)
    written.into(place)
    said = refused(replace(config, durability=Durability.NONE), place)
    (line,) = [line for line in said.splitlines() if "--recovery none" in line]
    assert f"{place / 'nvme'} has slabs (1) that were to outlive a service" in line
    assert disk_blocks(config) == 20
    asked = replace(config, durability=Durability.NONE, recovery=Recovery.NONE)
    assert disk_blocks(asked) == 0


def refused(config: ServeConfig, place: Path) -> str:
    """What a service says that does not start."""
    log = place / "refused.log"
    service = start(config, log)
    try:
        assert service.process.wait(DEADLINE_S) == 2
    finally:
        service.stop()
    said = log.read_text()
    assert "Traceback" not in said
    assert "ready" not in said
    return said


def without_slab(folder: Path) -> None:
    (folder / list_slabs(folder)[0].name).unlink()


def with_half_a_slab(folder: Path) -> None:
    os.truncate(folder / list_slabs(folder)[0].name, 4 * 4096)


def without_index(folder: Path) -> None:
    (folder / "index" / "data.mdb").unlink()


def with_a_bad_index(folder: Path) -> None:
    (folder / "index" / "data.mdb").write_bytes(b"\xa5" * 65536)


def after_a_power_cut(folder: Path) -> None:
    (folder / "index" / "unsynced").write_text("another boot\n")


@pytest.mark.parametrize(
    "damage, says, quiet",
    [
        (without_slab, "names 20 blocks in slabs that are missing or too short", 0),
        pytest.param(
            with_half_a_slab, "in slabs that are missing or too short", None, marks=pytest.mark.kill
        ),
        pytest.param(without_index, "does not exist", 20, marks=pytest.mark.kill),
        (with_a_bad_index, "is damaged", 20),
        (after_a_power_cut, "was not flushed before the machine stopped", 20),
    ],
)
def test_strict_names_what_is_damaged_and_quiet_takes_the_rest(
    place: Path, written: Written, damage: Callable[[Path], None], says: str, quiet: int | None
) -> None:
    config = config_of(place)
    written.into(place)
    damage(place / "nvme")
    before = {file.name: file.stat().st_size for file in (place / "nvme").rglob("*") if file.is_file()}
    said = refused(replace(config, recovery=Recovery.STRICT), place)
    line = next(line for line in said.splitlines() if "recovery is strict" in line)
    assert says in line
    assert f"kvstore fsck --repair {place / 'nvme'}" in line
    after = {file.name: file.stat().st_size for file in (place / "nvme").rglob("*") if file.is_file()}
    assert {name: size for name, size in after.items() if not name.startswith("lock")} == {
        name: size for name, size in before.items() if not name.startswith("lock")
    }
    found = disk_blocks(config)
    assert found == quiet if quiet is not None else found < 20


def test_strict_starts_over_what_is_whole_and_over_nothing(place: Path) -> None:
    config = config_of(place, recovery=Recovery.STRICT)
    filled(config)
    assert disk_blocks(config) == 20


def test_recovery_none_begins_empty(place: Path, written: Written) -> None:
    config = config_of(place)
    written.into(place)
    empty = replace(config, recovery=Recovery.NONE)
    with started(empty) as service:
        assert on_disk(service) == 0
        assert list_slabs(place / "nvme") == []
        one = RawClient(service.socket).begin()
        assert read_back(one, written.hashes) == [MISS] * 20
        one.close()
    assert disk_blocks(config) == 0, "and nothing comes back later"


@pytest.mark.parametrize(
    "point",
    [
        "load.sealed",
        *(
            pytest.param(point, marks=pytest.mark.kill)
            for point in ("load.extent", "load.copied", "load.slots", "load.rows", "load.extent_open")
        ),
    ],
)
def test_a_daemon_that_dies_while_it_finds_its_blocks_finds_them_again(
    place: Path, written: Written, point: str
) -> None:
    """Blocks that had not been entered when the daemon died were lost to it: it took its tables for complete."""
    config = config_of(place)
    written.into(place)
    service = start(config, place / "log", environ={"KVSTORE_FAULT": f"{point}:kill"})
    try:
        wait_for("all blocks", lambda: on_disk(service) == 20 and service.mover_pids())
        assert "died of signal 9" in (place / "log").read_text()
        one = RawClient(service.socket).begin()
        assert read_back(one, written.hashes) == [HIT_DRAM] * 20
        assert service.faults() == []
        one.close()
    finally:
        service.stop()


def test_blocks_are_cleared_by_model_from_the_command_line(place: Path) -> None:
    config = config_of(place)
    with started(config) as service:
        one, hashes = store(service, range(80))
        nobody = run("clear", "--model", "nobody", "--socket", service.socket)
        assert nobody.returncode == 1
        assert "no namespace of 'nobody'" in nobody.stderr
        without = run("clear", "--socket", service.socket)
        assert (without.returncode, "--model" in without.stderr) == (2, True)
        (info,) = json.loads(run("namespaces", "--socket", service.socket, "--json").stdout)["namespaces"]
        model = info["parts"]["model"]
        done = run("clear", "--model", model, "--socket", service.socket, "--json")
        assert json.loads(done.stdout) == {"removed_blocks": 20, "kept_blocks": 0, "namespaces": 1}, (
            done.stderr
        )
        assert read_back(one, hashes) == [MISS] * 20
        one.close()
        kill_all(service)
    assert disk_blocks(config) == 0


def test_the_end_in_order_leaves_a_mark_and_a_kill_none(place: Path) -> None:
    config = config_of(place)
    clean = place / "nvme" / "index" / "clean"
    with started(config) as service:
        one, _ = store(service, range(80))
        assert not clean.exists()
        one.close()
    assert clean.exists()
    with started(config) as service:
        kill_all(service)
    assert not clean.exists()


def test_after_a_kill_the_start_looks_closer(place: Path) -> None:
    """An index that a kill had left behind named blocks whose slots had others: a read of each found it out."""
    config = config_of(place)
    with started(config) as service:
        one, _ = store(service, range(80))
        one.close()
        kill_all(service)
    slab = list_slabs(place / "nvme")[0]
    with (place / "nvme" / slab.name).open("r+b") as file:
        file.seek(3 * (SLOT_BYTES + 4096) + SLOT_BYTES)
        file.write(bytes(4096))
    with started(config) as service:
        assert on_disk(service) == 19
        assert "blocks not found again" in (place / "kv.log").read_text()
        assert service.faults() == []


def test_after_an_end_in_order_it_does_not(place: Path, written: Written) -> None:
    config = config_of(place)
    written.into(place)
    slab = list_slabs(place / "nvme")[0]
    with (place / "nvme" / slab.name).open("r+b") as file:
        file.seek(3 * (SLOT_BYTES + 4096) + SLOT_BYTES)
        file.write(bytes(4096))
    assert disk_blocks(config) == 20, "what is damaged is found when it is read"
