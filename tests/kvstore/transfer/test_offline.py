"""Exports out of the folders of a service that does not run."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import typer

from kvstore.cli.export import export
from kvstore.cli.namespaces import ask, choose
from kvstore.config import NvmePath
from kvstore.errors import AlreadyExists, ConfigError, InvalidArgument
from kvstore.transfer.offline import opened_folders
from kvstore.transfer.restore import check_file
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.transfer.conftest import SLOT_BYTES, engine, many, parts
from tests.kvstore.transfer.test_transfer import imported, quiet
from tests.support.daemon import small_config, started
from tiers.nvme.slab import stride_bytes


def test_blocks_of_two_disks_come_out_without_a_service_and_are_served_elsewhere(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(place / name) for name in ("one", "two")]
    nvme = tuple(NvmePath(path=folder, capacity_bytes=96 * MIB) for folder in folders)
    with started(small_config(place, nvme=nvme)) as service:
        with engine(service, parts()) as one, engine(service, parts("other")) as other:
            hashes = one.store(many(1, 50))
            other.store(many(2, 7))
            assert one.client.flush().pending_blocks == 0
            digest = choose(ask(service.socket), "other", None).digest
        with pytest.raises(AlreadyExists, match=r"in use .* without --offline") as refused:
            export(place / "early", namespace="m", offline=True, nvme=folders)
        assert refused.value.retry_after_s is None, "a service in use does not end in a tenth of a second"
        reply = service.call("Clear", pb.ClearRequest(digest=digest), service="admin")
        assert isinstance(reply, pb.ClearReply)
        assert (reply.removed_blocks, reply.kept_blocks) == (7, 0)
    with opened_folders(folders) as offline:
        told = {
            part.value: info.blocks
            for info in offline.namespaces()
            for part in info.parts
            if part.tag == "model"
        }
        assert told == {b"m": 50, b"other": 0}, "what was cleared stays cleared"
    export(place / "m.kvx", namespace="m", offline=True, nvme=folders)
    assert capsys.readouterr().out.startswith("50 blocks of 16KiB in ")
    header, found = asyncio.run(check_file(place / "m.kvx", progress=quiet))
    assert (found.stored, found.complete, header.planned_blocks) == (50, True, 50)
    (place / "b").mkdir()
    with started(small_config(place / "b")) as service:
        assert imported(service, place / "m.kvx").stored == 50
        with engine(service, parts()) as two:
            assert two.served(hashes) == 50


def test_a_damaged_block_is_left_out(place: Path) -> None:
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service, engine(service, parts()) as one:
        one.store(many(1, 10))
        assert one.client.flush().pending_blocks == 0
    (slab,) = (place / "nvme").glob("slab-*.kv")
    with slab.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(typer.Exit):
        export(place / "m.kvx", namespace="m", offline=True, nvme=[str(place / "nvme")])
    _, found = asyncio.run(check_file(place / "m.kvx", progress=quiet))
    assert (found.stored, found.damaged, found.complete) == (9, 0, True)


def test_a_slab_that_cannot_be_opened_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counted as empty: the export said that all was well, and lacked what was in it."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service, engine(service, parts()) as one:
        one.store(many(1, 10))
        assert one.client.flush().pending_blocks == 0
    slab = place / "nvme" / "slab-99-16384.kv"
    slab.symlink_to("elsewhere")  # which nobody follows
    with pytest.raises(typer.Exit):
        export(place / "m.kvx", namespace="m", offline=True, nvme=[str(place / "nvme")])
    assert f"no block of {slab}: Too many levels of symbolic links" in capsys.readouterr().out
    _, found = asyncio.run(check_file(place / "m.kvx", progress=quiet))
    assert (found.stored, found.complete) == (10, True), "the rest is in the file"


def test_of_two_copies_of_a_block_the_whole_one_is_read(place: Path) -> None:
    """Of a block that lay on two disks one copy was chosen; where that was damaged, the block was left out."""
    with started(small_config(place, nvme_bytes=128 * MIB)) as service, engine(service, parts()) as one:
        one.store(many(1, 10))
        assert one.client.flush().pending_blocks == 0
    shutil.copytree(place / "nvme", place / "other")
    for name, slot in (("nvme", 0), ("other", 1)):
        (slab,) = (place / name).glob("slab-*.kv")
        with slab.open("r+b") as file:
            file.seek(slot * stride_bytes(SLOT_BYTES) + 5000)
            file.write(b"\xff\xff")
    folders = [str(place / name) for name in ("nvme", "other")]
    export(place / "m.kvx", namespace="m", offline=True, nvme=folders)
    _, found = asyncio.run(check_file(place / "m.kvx", progress=quiet))
    assert (found.stored, found.complete) == (10, True)


def test_what_cannot_be_is_said_in_one_line(place: Path) -> None:
    with pytest.raises(ConfigError, match="is no path of kvstore"):
        export(place / "x", namespace="m", offline=True, nvme=[str(place)])
    with pytest.raises(InvalidArgument, match="add --offline"):
        export(place / "x", namespace="m", nvme=[str(place)])
    with pytest.raises(ConfigError, match="no NVMe path"), opened_folders([]):
        pass
