"""Shards of a block: where each lies, and which devices' shards are believed."""

from __future__ import annotations

import pytest

from kvstore.client.group import WHOLE, Shard, group_identity
from kvstore.errors import InvalidArgument


def test_parts_lie_one_behind_the_other() -> None:
    parts = [Shard(member=member, members=4) for member in range(4)]
    assert [part.nbytes(65536) for part in parts] == [16384] * 4
    assert [part.offset(65536) for part in parts] == [0, 16384, 32768, 49152]


def test_a_whole_block_is_its_own_only_part() -> None:
    assert (WHOLE.nbytes(4096), WHOLE.offset(4096)) == (4096, 0)


def test_parts_that_are_no_whole_pages_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="take larger blocks"):
        Shard(member=0, members=2).nbytes(3 * 4096)


def test_all_devices_count_in_their_order() -> None:
    names = [group_identity(devices) for devices in (["a", "b"], ["b", "a"], ["a"], ["a", "c"], ["ab", ""])]
    assert len(set(names)) == len(names)
    assert group_identity(["a", "b"]) == names[0]
    assert all(len(name) < 256 for name in names)
