"""An export with any bytes in it: what is whole is stored, the rest passed over, and no wrong block is ever served."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.cli.admin import call_admin
from kvstore.client import connect
from kvstore.errors import Corruption, KvstoreError
from kvstore.identity import HashChain
from kvstore.layout import touch_key
from kvstore.moves import Outcome
from kvstore.transfer.archive import (
    BlockHead,
    Header,
    RunningDigest,
    pack_end,
    pack_head,
    pack_header,
    payload_checksum,
)
from kvstore.transfer.restore import Imported, check_file, import_file
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.fuzz.rig import Target, examples
from tests.kvstore.transfer.conftest import SLOT_BYTES, Engine, engine, many, parts
from tests.support.blocks import block_bytes, expected
from tests.support.daemon import Service, small_config, started, wait_for

BLOCKS = 6
KEY = bytes(range(32))
HASHES: NDArray[np.uint64] = HashChain(KEY, 1, many(1, BLOCKS)).hashes


def whole_file() -> bytes:
    header = Header(parts=parts(), key=KEY, slot_bytes=SLOT_BYTES, planned_blocks=BLOCKS, created_ms=5)
    running = RunningDigest()
    packed = pack_header(header)
    for depth, block in enumerate(HASHES):
        payload = block_bytes(block, SLOT_BYTES).tobytes()
        head = pack_head(
            BlockHead(
                hash=block.tobytes(),
                parent=HASHES[depth - 1].tobytes() if depth else bytes(16),
                depth=depth,
                touch=int(touch_key(1, np.array([depth], dtype=np.uint32))[0]),
                checksum=payload_checksum(payload),
            )
        )
        running.add(head)
        packed += head + payload
    return packed + pack_end(running.end())


WHOLE = whole_file()
PLACES = (
    st.integers(0, len(WHOLE) - 1)
    | st.integers(0, 600)
    | st.integers(len(WHOLE) - 60, len(WHOLE) - 1)
    | st.builds(
        lambda block, byte: len(WHOLE) - 40 - (block + 1) * (SLOT_BYTES + 72) + byte,
        st.integers(0, BLOCKS - 1),
        st.integers(0, 120),
    )
)
DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "cut"]), PLACES, st.binary(min_size=1, max_size=80)
    ),
    min_size=1,
    max_size=3,
)


def damaged(damages: list[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(WHOLE)
    for how, at, new in damages:
        if how == "replace":
            data[at : at + len(new)] = new
        elif how == "insert":
            data[at:at] = new
        elif how == "delete":
            del data[at : at + len(new)]
        else:
            del data[at:]
    return bytes(data)


def quiet(_done: int, _total: int) -> None:
    """Nobody looks."""


@examples(60)
@given(DAMAGES)
def test_a_check_says_what_is_whole(damages: list[tuple[str, int, bytes]]) -> None:
    data = damaged(damages)
    with tempfile.NamedTemporaryFile(suffix=".kvx") as file:
        file.write(data)
        file.flush()
        try:
            _, found = asyncio.run(check_file(Path(file.name), progress=quiet))
        except Corruption:
            return
    assert found.stored <= BLOCKS or data.count(b"KVBK") > BLOCKS
    assert (found.complete and not found.damaged) <= (data == WHOLE), "damage was not seen"


def test_an_import_stores_what_is_whole() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        place = Path(name)
        with started(small_config(place)) as service:
            target = Target(service)
            (place / "m.kvx").write_bytes(WHOLE)
            assert taken(service, place / "m.kvx").stored == BLOCKS
            with engine(service, parts()) as reader:
                assert right_blocks(reader) == BLOCKS

                @examples(12)
                @given(DAMAGES)
                def attack(damages: list[tuple[str, int, bytes]]) -> None:
                    wait_for("no blocks", lambda: emptied(service))
                    (place / "m.kvx").write_bytes(damaged(damages))
                    try:
                        stored = taken(service, place / "m.kvx").stored
                    except KvstoreError:
                        stored = 0
                    assert right_blocks(reader) <= stored
                    target.check()

                attack()


def emptied(service: Service) -> bool:
    """Whether nothing is left: what a reader still holds is not cleared."""
    service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
    return service.stats().rows == 0


def taken(service: Service, file: Path) -> Imported:
    admin = functools.partial(call_admin, service.socket)
    with connect(service.socket) as client:
        return asyncio.run(import_file(client, admin, file, replace_key=False, progress=quiet))[1]


def right_blocks(reader: Engine) -> int:
    """How many blocks are served; each must have its own bytes."""
    pending = reader.session.acquire(reader.namespace, 1, HASHES)
    grant = pending.result(10.0)
    hits = np.flatnonzero(grant.outcomes == Outcome.HIT_DRAM).tolist()
    for at in hits:
        assert expected(HASHES[at], reader.session.dram.view(int(grant.dram_slots[at]))), (
            f"block {at} is wrong"
        )
    pending.abandon()
    reader.session.step()
    return len(hits)
