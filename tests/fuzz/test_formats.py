"""What is read from a file, a socket or shared memory, with any bytes in it: a refusal of ours, or the truth."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, Corruption, InvalidArgument, KvstoreError
from kvstore.identity import namespace_digest
from kvstore.moves import MoveKind
from kvstore.recorder import Event, RingRecorder, read_ring, ring_bytes
from kvstore.settings import resolve
from kvstore.transfer import archive
from kvstore.wire import descriptors, frames
from kvstore.wire import mover as mover_wire
from kvstore.wire.packed import MOVE, REPLY
from tests.fuzz.rig import examples, mutations
from tiers.nvme.cleared import EVERY_NAMESPACE, note_cleared, read_cleared, without_cleared
from tiers.nvme.directory import read_secret
from tiers.nvme.index import RECORD
from tiers.nvme.probe import probe_threads
from tiers.nvme.scan import scan_slabs
from tiers.nvme.slab import SlabFile, list_slabs, open_slab
from tiers.nvme.trailer import Trailer, read_trailer, write_trailer

DEEP = st.just(100_000).map(lambda depth: b"[" * depth)
"""Deeper than a parser's stack."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def moves() -> bytes:
    made = np.zeros(2, dtype=MOVE)
    made["id"], made["kind"] = (1, 2), MoveKind.WRITE
    return made.tobytes()


# ------------------------------------------------------------ packets

MOVER_PACKETS = [
    mover_wire.pack(mover_wire.Config(directory="/d")),
    mover_wire.pack(mover_wire.Moves(np.frombuffer(moves(), dtype=MOVE))),
    mover_wire.pack(mover_wire.Replies(np.zeros(3, dtype=REPLY))),
    mover_wire.pack(mover_wire.Sync(id=7)),
    mover_wire.pack(mover_wire.Notice(text="ö" * 40)),
    mover_wire.pack(mover_wire.SlabFailed(extent=3, number=1, text="no")),
    mover_wire.pack(mover_wire.SlabLost(extent=3, number=1)),
]
DESCRIPTOR_PACKETS = [
    descriptors.pack(descriptors.Hello(token=bytes(16), member=1)),
    descriptors.pack(descriptors.NewHbm(nbytes=4096, slots=1, slot_bytes=4096)),
    descriptors.pack(descriptors.Refused(text="ö" * 40)),
]


@examples(150)
@given(
    mutations(st.sampled_from(MOVER_PACKETS))
    | DEEP.map(lambda deep: b"\x01\0\0\0" + deep)
    | st.binary(max_size=64)
)
def test_packets_of_movers(packet: bytes) -> None:
    """A packet is understood, or refused by InvalidArgument: both ends end the connection by that."""
    with contextlib.suppress(InvalidArgument):
        mover_wire.parse(packet)


@examples(150)
@given(mutations(st.sampled_from(DESCRIPTOR_PACKETS)) | st.binary(max_size=64))
def test_packets_of_descriptors(packet: bytes) -> None:
    try:
        message = descriptors.parse(packet)
    except InvalidArgument:
        return
    assert len(descriptors.pack(message)) <= descriptors.MAX_PACKET_BYTES or len(packet) > 400


@examples(100)
@given(st.lists(st.binary(max_size=40) | st.binary(max_size=40).map(frames.frame), max_size=6))
def test_frames_hold_at_most_one_message(pieces: list[bytes]) -> None:
    reader = frames.FrameReader(max_bytes=64)
    try:
        for piece in pieces:
            for message in reader.feed(piece):
                assert len(message) <= 64
    except KvstoreError:
        pass


# ------------------------------------------------------------ slabs

TRAILER = Trailer(3, 8192, 4096, 5, 1_700_000_000_000, b"h" * 16, b"p" * 16, b"n" * 16, b"c" * 16)


def trailer_page() -> bytes:
    page = bytearray(4096)
    write_trailer(memoryview(page), TRAILER)
    return bytes(page)


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 111), st.integers(0, 255)), max_size=4))
def test_a_trailer_is_what_was_written_or_none(changes: list[tuple[int, int]]) -> None:
    page = bytearray(trailer_page())
    before = bytes(page)
    for at, value in changes:
        page[at] = value
    found = read_trailer(memoryview(page))
    assert found == (TRAILER if bytes(page) == before else None)


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 8 * 8192 - 1), st.binary(min_size=1, max_size=200)), max_size=4))
def test_a_scan_finds_what_was_written_or_less(folder: Path, changes: list[tuple[int, bytes]]) -> None:
    """Damage anywhere in a slab: every record that is found says what the slot's writer said."""
    slab = open_slab(folder, 1, 8 * 8192, 4096, direct=False)
    written: dict[int, Trailer] = {}
    for slot in range(8):
        page = bytearray(4096)
        written[slot] = TRAILER._replace(offset=slot * 8192, hash=bytes([slot + 1]) * 16, generation=slot)
        write_trailer(memoryview(page), written[slot])
        slab.write([memoryview(bytes(4096)), memoryview(page)], slot * 8192)
    slab.close()
    file = folder / slab.file.name
    with file.open("r+b") as stream:
        for at, data in changes:
            stream.seek(at)
            stream.write(data[: 8 * 8192 - at])
    for record in scan_slabs(folder, [slab.file]):
        slot = int(record["slot"])
        assert record["hash"].tobytes() == written[slot].hash
        assert record["generation"] == written[slot].generation
        assert record["length"] == 4096
    file.unlink()


NAMES = st.from_regex(r"slab-[0-9]{1,12}-[0-9]{1,12}\.kv(\.new)?", fullmatch=True)


@examples(40)
@given(st.lists(NAMES | st.text("slab-0123456789.kvnewx", min_size=1, max_size=30), max_size=5))
def test_names_that_are_no_slabs_are_passed_over(folder: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name in names:
            if name not in (".", ".."):
                (Path(place) / name).touch()
        for file in list_slabs(Path(place)):
            assert isinstance(file, SlabFile)
            assert file.name in names or int(file.name.split("-")[1]) >= 0
        assert all(int(record["slot"]) >= 0 for record in scan_slabs(Path(place), list_slabs(Path(place))))


# ------------------------------------------------------------ small files beside them

DIGEST = b"\xab" * 16


def lines_of_clears() -> bytes:
    return f"{DIGEST.hex()} 1700000000000\n* 1600000000000\n".encode()


@examples(150)
@given(
    mutations(st.just(lines_of_clears()))
    | st.binary(max_size=80)
    | st.sampled_from([b"* -5\n", b"* 99999999999999999999999\n", b" 5\n", b"* 1_0\n", b"ab 5\n", b"* 5 5\n"])
)
def test_the_file_of_clears(folder: Path, text: bytes) -> None:
    """A damaged number in it ended the start with an OverflowError."""
    (folder / "cleared").write_bytes(text)
    try:
        found = read_cleared(folder)
    except Corruption:
        return
    records = np.zeros(3, dtype=RECORD)
    records["touch"] = np.array([0, 5 << 20, (1 << 64) - 1], dtype=np.uint64)
    without_cleared(records, found)
    assert all(len(digest) in (0, 16) and ms >= 0 for digest, ms in found.items())
    note_cleared(folder, {EVERY_NAMESPACE: 7})
    assert read_cleared(folder)[EVERY_NAMESPACE] >= 7
    assert len(without_cleared(records[:1], read_cleared(folder))) == 0


@examples(40)
@given(st.binary(max_size=64))
def test_a_secret_is_whole_or_refused(folder: Path, text: bytes) -> None:
    (folder / "secret").write_bytes(text)
    try:
        assert read_secret(folder) == text
        assert len(text) == 32
    except ConfigError:
        assert len(text) != 32


@examples(8)
@given(st.binary(max_size=12) | st.sampled_from([b"0", b"-4", b"17", b"8", "٣".encode(), b"9" * 5000]))
def test_the_remembered_threads_are_some(folder: Path, text: bytes) -> None:
    (folder / "threads").write_bytes(text)
    assert 1 <= probe_threads(folder) <= 16


# ------------------------------------------------------------ configuration

CONFIG = b"""
[serve]
dram = "64MiB"
nvme = ["/var/lib/kvstore:1GiB"]
durability = "process"
[serve.limits]
max_rows = 1000
"""


@examples(150)
@given(
    mutations(st.just(CONFIG))
    | st.binary(max_size=100)
    | DEEP.map(lambda deep: b"a = " + deep)
    | st.sampled_from([b"dram = 1" + b"0" * 5000, b"dram = nan", b"serve = 3"])
)
def test_any_configuration_file(text: bytes) -> None:
    """A file that nests too deeply ended the command with a traceback."""
    with contextlib.suppress(ConfigError):
        resolve(flags={}, environ={}, uid=0, file=text.decode(errors="replace"))


@examples(150)
@given(
    st.sampled_from(["KVSTORE_DRAM", "KVSTORE_NVME", "KVSTORE_MAX_ROWS", "KVSTORE_SOCKET"]),
    st.text(max_size=40),
)
def test_any_environment(name: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        resolve(flags={}, environ={name: value}, uid=0)


# ------------------------------------------------------------ exports and recordings

PARTS = {"model": b"m", "weights": b"w", "dtype": b"float32", "block_tokens": b"4", "groups": b"g"}
HEADER = archive.Header(parts=PARTS, key=bytes(32), slot_bytes=4096, planned_blocks=2, created_ms=5)
HEAD = archive.BlockHead(hash=b"h" * 16, parent=b"p" * 16, depth=3, touch=1 << 40, checksum=b"c" * 16)


@examples(150)
@given(mutations(st.just(archive.pack_header(HEADER))) | st.binary(max_size=100))
def test_the_header_of_an_export(data: bytes) -> None:
    try:
        rest = archive.rest_of_header(data[: archive.PREFIX_BYTES])
        found = archive.read_header(data[: archive.PREFIX_BYTES + rest])
    except Corruption:
        return
    assert found == HEADER


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just(bytes(32).hex()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = {"parts": {tag: value.hex() for tag, value in PARTS.items()}, "key": bytes(32).hex()}


@examples(150)
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("parts", "key", "slot_bytes", "planned_blocks", "created_ms"), JSON),
    ).map(
        lambda changed: json.dumps(
            {**FIELDS, "slot_bytes": 4096, "planned_blocks": 1, "created_ms": 1, **changed}
        )
    )
    | JSON.map(json.dumps)
    | DEEP.map(bytes.decode)
)
def test_a_header_that_somebody_has_made_up(text: str) -> None:
    """An export is somebody else's file: a number without an end, or nesting without one, ended the import."""
    packed = text.encode()
    whole = (
        archive.pack_header(HEADER)[:8]
        + (1).to_bytes(4, "little")
        + len(packed).to_bytes(4, "little")
        + packed
    )
    whole += xxhash.xxh3_128_digest(whole)
    try:
        found = archive.read_header(whole)
    except Corruption:
        return
    assert len(found.key) == 32
    assert namespace_digest(found.parts)


@examples(150)
@given(
    st.sampled_from([(archive.pack_head(HEAD), archive.read_head, HEAD)]).flatmap(
        lambda case: mutations(st.just(case[0])).map(lambda data: (data, *case))
    )
)
def test_the_heads_of_an_export(
    case: tuple[bytes, bytes, Callable[[bytes], archive.BlockHead | None], archive.BlockHead],
) -> None:
    data, whole, read, head = case
    data = data[: len(whole)].ljust(len(whole), b"\0")
    assert read(data) == (head if data == whole else None)


@dataclass(frozen=True, slots=True)
class Ring:
    memory: bytes
    numbers: tuple[int, ...]


def ring() -> Ring:
    memory = bytearray(ring_bytes(16))
    recorder = RingRecorder(memoryview(memory), lambda: 7)
    for who in range(20):
        recorder.note(Event.ATTACH, who=who)
    return Ring(bytes(memory), tuple(record.number for record in read_ring(bytes(memory))))


RING = ring()


@examples(150)
@given(
    st.lists(st.tuples(st.integers(0, len(RING.memory) - 1), st.binary(min_size=1, max_size=80)), max_size=4)
)
def test_a_damaged_recording_shows_what_is_whole(changes: list[tuple[int, bytes]]) -> None:
    memory = bytearray(RING.memory)
    for at, data in changes:
        memory[at : at + len(data)] = data
    memory = memory[: len(RING.memory)]
    try:
        found = read_ring(bytes(memory))
    except Corruption:
        found = []
    assert {record.number for record in found} <= set(RING.numbers)
    before = len(found)
    again = RingRecorder(memoryview(memory), lambda: 8)
    again.note(Event.READY)
    assert before <= len(read_ring(bytes(memory))) + 1
