"""Export and import between real services: bytes, keys, damage, and deaths of either side in the middle."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.cli.admin import call_admin
from kvstore.cli.namespaces import _as_dict, _render, ask, choose
from kvstore.client import connect
from kvstore.errors import Corruption, FailedPrecondition, InvalidArgument, NotFound
from kvstore.transfer.archive import HEAD_BYTES
from kvstore.transfer.export import Exported, export_namespace, unfinished
from kvstore.transfer.restore import Imported, check_file, import_file
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.transfer.conftest import SLOT_BYTES, engine, many, parts
from tests.support.command import Done, kvstore
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import RawClient

RECORD_BYTES = HEAD_BYTES + SLOT_BYTES
Progress = Callable[[int, int], None]


def quiet(_done: int, _total: int) -> None:
    """Nobody looks."""


def exported(service: Service, file: Path, model: str = "m", progress: Progress = quiet) -> Exported:
    info = choose(ask(service.socket), model, None)
    admin = functools.partial(call_admin, service.socket)
    with connect(service.socket) as client:
        return asyncio.run(export_namespace(client, admin, info, file, progress=progress))


def imported(
    service: Service, file: Path, *, replace_key: bool = False, progress: Progress = quiet
) -> Imported:
    admin = functools.partial(call_admin, service.socket)
    with connect(service.socket) as client:
        work = import_file(client, admin, file, replace_key=replace_key, progress=progress)
        return asyncio.run(work)[1]


def folders(place: Path) -> tuple[Path, Path, Path]:
    """Two machines and a file."""
    for name in "ab":
        (place / name).mkdir()
    return place / "a", place / "b", place / "m.kvx"


def test_a_namespace_moves_from_one_machine_to_another_and_outlives_its_restart(place: Path) -> None:
    here, there, file = folders(place)
    with started(small_config(here, nvme_bytes=128 * MIB)) as service, engine(service, parts()) as one:
        on_disk = one.store(many(1, 40))
        assert one.client.flush().pending_blocks == 0
    with started(small_config(here, nvme_bytes=128 * MIB)) as service:  # and now DRAM is empty
        assert service.tier("dram").sealed_slots == 0
        with engine(service, parts()) as one, engine(service, parts("other")) as foreign:
            in_dram = one.store(many(2, 20))
            foreign.store(many(3, 5))
            before = service.stats().counters
            done = exported(service, file)
            after = service.stats().counters
        assert (done.blocks, done.gone, done.hbm_only, done.slot_bytes) == (60, 0, 0, SLOT_BYTES)
        assert os.stat(file).st_mode & 0o777 == 0o600
        assert not unfinished(file).exists()
        for name in ("promotions", "evictions_dram", "blocks_hit_dram"):
            assert before.get(name, 0) == after.get(name, 0), "an export moves nothing"
    config = small_config(there, nvme_bytes=128 * MIB)
    with started(config) as service:
        found = imported(service, file)
        assert (found.stored, found.known, found.damaged, found.complete) == (60, 0, 0, True)
        assert found.not_durable == 0
        with engine(service, parts()) as two:
            assert (two.hashes(many(1, 40)) == on_disk).all(), "the key came along"
            assert two.served(on_disk) == 40
            assert two.served(in_dram) == 20
        again = imported(service, file)
        assert (again.stored, again.known, again.complete) == (0, 60, True)
        assert service.faults() == []
        os.kill(service.keeper_pid, signal.SIGSTOP)
        os.kill(service.daemon_pid, signal.SIGKILL)
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait(30)
    with started(config) as service, engine(service, parts()) as two:
        assert two.served(two.hashes(many(1, 40))) == 40, "key and blocks are on disk"
        told = choose(ask(service.socket), "m", None)
        assert (told.adopted, told.blocks) == (True, 60)


def test_without_a_disk_blocks_go_from_dram_to_dram(place: Path) -> None:
    here, there, file = folders(place)
    with started(small_config(here)) as service, engine(service, parts()) as one:
        hashes = one.store(many(1, 30))
        assert exported(service, file).blocks == 30
        service.kill_daemon()  # names and keys are in memory that stays
        assert exported(service, place / "again.kvx").blocks == 30
    with started(small_config(there)) as service:
        found = imported(service, file)
        assert (found.stored, found.not_durable, found.complete) == (30, 30, True)
        service.kill_daemon()
        with engine(service, parts()) as two:
            assert two.served(hashes) == 30


def test_blocks_of_its_own_are_not_given_up_unasked(place: Path) -> None:
    here, there, file = folders(place)
    with started(small_config(here)) as service, engine(service, parts()) as one:
        hashes = one.store(many(1, 10))
        exported(service, file)
    with started(small_config(there)) as service:
        with engine(service, parts()) as two:
            two.store(many(2, 7))
        with pytest.raises(FailedPrecondition, match=r"7 blocks .* --replace-key") as refused:
            imported(service, file)
        assert "\n" not in str(refused.value)
        assert service.stats().rows == 7
        found = imported(service, file, replace_key=True)
        assert found.stored == 10
        with engine(service, parts()) as two:
            assert two.served(hashes) == 10
            assert two.served(two.hashes(many(2, 7))) == 0


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An export of 25 blocks."""
    folder = tmp_path_factory.mktemp("kv")
    with started(small_config(folder)) as service, engine(service, parts()) as one:
        one.store(many(1, 25))
        exported(service, folder / "m.kvx")
    return (folder / "m.kvx").read_bytes()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Service:  # type: ignore[misc]
    """A service to import into."""
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


def emptied(service: Service) -> Service:
    """Nothing is cached."""
    wait_for("nothing to be held", lambda: not cleared(service).kept_blocks)
    return service


def cleared(service: Service) -> pb.ClearReply:
    reply = service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
    assert isinstance(reply, pb.ClearReply)
    return reply


def test_what_is_whole_of_a_file_that_was_cut_short_is_stored(
    archive: bytes, target: Service, tmp_path: Path
) -> None:
    begin = len(archive) - 25 * RECORD_BYTES - 40
    (tmp_path / "cut").write_bytes(archive[: begin + 11 * RECORD_BYTES + 5000])
    found = imported(emptied(target), tmp_path / "cut")
    assert (found.stored, found.damaged, found.complete) == (11, 0, False)
    assert "cut short: up to 14 blocks" in found.why_not
    (tmp_path / "endless").write_bytes(archive[:-40])
    found = imported(emptied(target), tmp_path / "endless")
    assert (found.stored, found.complete) == (25, False)


def test_damaged_blocks_are_left_out_and_cost_no_other(
    archive: bytes, target: Service, tmp_path: Path
) -> None:
    begin = len(archive) - 25 * RECORD_BYTES - 40
    damaged = bytearray(archive)
    damaged[begin + 3 * RECORD_BYTES + HEAD_BYTES + 777] ^= 1  # a payload
    damaged[begin + 9 * RECORD_BYTES + 20] ^= 1  # a head
    (tmp_path / "bad").write_bytes(damaged)
    found = imported(emptied(target), tmp_path / "bad")
    assert (found.stored, found.damaged, found.complete) == (23, 2, False)
    with engine(target, parts()) as one:
        assert one.served(one.hashes(many(1, 25))) == 3
    header, checked = asyncio.run(check_file(tmp_path / "bad", progress=quiet))
    assert (checked.stored, checked.damaged, header.planned_blocks) == (23, 2, 25)


def test_exchanged_blocks_are_noticed_by_the_digest_of_the_whole(archive: bytes, tmp_path: Path) -> None:
    begin = len(archive) - 25 * RECORD_BYTES - 40
    one, two = (slice(begin + at * RECORD_BYTES, begin + (at + 1) * RECORD_BYTES) for at in (2, 4))
    exchanged = bytearray(archive)
    exchanged[one], exchanged[two] = archive[two], archive[one]
    (tmp_path / "file").write_bytes(exchanged)
    _, found = asyncio.run(check_file(tmp_path / "file", progress=quiet))
    assert (found.stored, found.complete) == (25, False)


@pytest.mark.parametrize("junk", [b"", b"short", b"\x00" * 5000, b"KVEXPORT" + b"\xff" * 5000])
def test_what_is_no_export_is_refused_in_one_line(junk: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(junk)
    with pytest.raises(Corruption) as refused:
        asyncio.run(check_file(tmp_path / "junk", progress=quiet))
    assert "\n" not in str(refused.value)


def test_commands_say_what_they_did(archive: bytes, target: Service, tmp_path: Path) -> None:
    def run(*arguments: str) -> Done:
        return kvstore(*arguments, "--socket", target.socket)

    emptied(target)
    (tmp_path / "m.kvx").write_bytes(archive)
    done = run("import", str(tmp_path / "m.kvx"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("25 blocks of 16KiB stored, of model m")
    listed = run("namespaces")
    assert " m " in listed.stdout
    assert "25" in listed.stdout
    done = run("export", str(tmp_path / "out.kvx"), "--namespace", "m")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("25 blocks of 16KiB in ")
    assert run("export", str(tmp_path / "out.kvx"), "--namespace", "m").returncode == 1
    (tmp_path / "cut.kvx").write_bytes(archive[:-100])
    done = run("import", str(tmp_path / "cut.kvx"))
    assert done.returncode == 1
    assert "cut short" in done.stdout


def test_a_namespace_is_chosen_by_model_tenant_or_digits(target: Service) -> None:
    with (
        engine(target, parts("llama", tenant=b"x")) as one,
        engine(target, parts("llama", tenant=b"y")) as two,
    ):
        one.store(many(7, 2))
        two.store(many(8, 3))
        found = ask(target.socket)
        with pytest.raises(InvalidArgument, match="several"):
            choose(found, "llama", None)
        chosen = choose(found, "llama", "y")
        assert chosen.blocks == 3
        assert choose(found, chosen.digest.hex()[:12], None) == chosen
        with pytest.raises(NotFound):
            choose(found, "gpt", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Big:
    """A namespace of 2,500 blocks, exported twice."""

    whole: Path  # while its daemon was killed and came back
    cut_short: Path  # by the end of the exporter
    hashes: NDArray[np.uint64]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Big:
    folder = tmp_path_factory.mktemp("kv")
    file, killed = folder / "m.kvx", list[int]()
    with started(small_config(folder)) as service, engine(service, parts()) as one:
        hashes = one.store(many(1, 2500))

        def fail(_done: int, _total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            exported(service, file, progress=fail)
        assert not file.exists()
        assert [session.name for session in service.stats().sessions] == ["engine"]
        cut_short = unfinished(file).rename(folder / "cut")

        def kill(_done: int, _total: int) -> None:
            if not killed:
                killed.append(service.kill_daemon())

        assert exported(service, file, progress=kill).blocks == 2500, "a daemon that dies costs no block"
        assert killed
    return Big(whole=file, cut_short=cut_short, hashes=hashes)


def test_a_killed_import_is_simply_run_again(big: Big, target: Service) -> None:
    before = emptied(target).stats().counters.get("seals_published", 0)
    command = [sys.executable, "-m", "kvstore.cli.main", "import", str(big.whole), "--socket", target.socket]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for("the first blocks", lambda: target.stats().counters.get("seals_published", 0) > before)
        process.kill()
    stored = target.stats().rows
    wait_for("its session's end", lambda: not target.stats().sessions)
    found = imported(target, big.whole)
    assert (found.stored + found.known, found.complete) == (2500, True)
    assert found.known >= stored > 0
    with engine(target, parts()) as two:
        assert two.served(big.hashes) == 2500
    assert target.faults() == []


def test_a_daemon_that_dies_in_the_middle_costs_no_block(big: Big, target: Service) -> None:
    killed: list[int] = []

    def kill(_done: int, _total: int) -> None:
        if not killed:
            killed.append(target.kill_daemon())

    found = imported(emptied(target), big.whole, progress=kill)
    assert killed
    assert (found.stored + found.known, found.damaged, found.complete) == (2500, 0, True)
    assert found.put_out == 0
    with engine(target, parts()) as two:
        assert two.served(big.hashes) == 2500
    assert target.faults() == []


def test_a_killed_export_leaves_a_file_that_can_be_imported(big: Big, target: Service) -> None:
    found = imported(emptied(target), big.cut_short)
    assert found.stored > 0
    assert not found.complete


def test_a_file_larger_than_the_tier_does_not_put_out_its_own_beginning(big: Big, place: Path) -> None:
    with started(small_config(place, dram_bytes=16 * MIB)) as service:
        found = imported(service, big.whole)
        assert found.stored == int(16 * MIB * 0.9) // SLOT_BYTES
        assert (found.stored + found.no_room, found.put_out) == (2500, 0)
        with engine(service, parts()) as two:
            assert two.served(big.hashes) == found.stored


def test_what_only_hbm_has_is_counted_and_left_out(place: Path) -> None:
    here, _, file = folders(place)
    with started(small_config(here)) as service:
        one = RawClient(service.socket).begin()
        both, _ = one.fill(range(40))
        with pytest.raises(FailedPrecondition, match="HBM alone"):
            exported(service, file)
        one.write_through(both)
        one.fill(range(100, 120))
        done = exported(service, file)
        assert (done.blocks, done.hbm_only, done.gone) == (10, 5, 0)
        one.close()


def test_a_namespace_that_nobody_has_opened_since_is_listed_and_not_exported(place: Path) -> None:
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service, engine(service, parts()) as one:
        one.store(many(1, 5))
        assert one.client.flush().pending_blocks == 0
    (place / "nvme/namespaces").unlink()
    with started(config) as service:
        (info,) = ask(service.socket)
        assert (info.blocks, list(info.parts)) == (5, [])
        digits = info.digest.hex()[:8]
        assert digits in " ".join(cell for column in _render([info]).columns for cell in column.cells)  # type: ignore[misc]
        with pytest.raises(FailedPrecondition, match="attach its engine"):
            exported(service, place / "x", model=digits)
        with engine(service, parts()):
            assert choose(ask(service.socket), digits, None).parts
        assert exported(service, place / "x").blocks == 5


def test_a_salt_is_shown_to_nobody_and_travels_with_its_blocks(place: Path) -> None:
    with started(small_config(place)) as service, engine(service, parts(salt=b"hunter2")) as one:
        one.store(many(1, 2))
        (info,) = ask(service.socket)
        assert "hunter2" not in json.dumps(_as_dict(info))
        assert info.key.hex() not in json.dumps(_as_dict(info))
        assert exported(service, place / "x").blocks == 2
        header, _ = asyncio.run(check_file(place / "x", progress=quiet))
        assert header.parts["salt"] == b"hunter2"


def test_memory_that_leaves_the_service_meanwhile_hurts_nobody(place: Path) -> None:
    """An extent was unmapped under the copy out of it: the exporter holds no slot that would have kept it."""
    here, _, file = folders(place)
    with started(small_config(here)) as service:
        with engine(service, parts()) as one:
            one.store(many(1, 3500))
            wait_for("all of it in DRAM", lambda: service.tier("dram").sealed_slots >= 3500)
        shrunk: list[object] = []

        def shrink(_done: int, _total: int) -> None:
            if not shrunk:
                request = pb.ResizeRequest(tier="dram", capacity_bytes=16 * MIB)
                shrunk.append(service.call("Resize", request, service="admin"))
                wait_for("less memory", lambda: service.tier("dram").allocated_bytes == 16 * MIB)

        done = exported(service, file, progress=shrink)
        assert shrunk
        assert (done.blocks + done.gone, done.unread) == (3500, 0)
        assert done.gone > 0
        _, found = asyncio.run(check_file(file, progress=quiet))
        assert (found.stored, found.damaged, found.complete) == (done.blocks, 0, True)
