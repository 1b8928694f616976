"""A session of several processes, each with a shard of every block in the HBM of its own device.

The process that schedules has the `Session` and makes all calls; the others (`kvstore.client.member`) present
themselves, map their shard and the whole DRAM, and copy and compute what they are told. A slot has the same number in
each process. In DRAM and below a block is whole: the shards' bytes in the order of the processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import InvalidArgument
from kvstore.geometry import SLOT_ALIGN_BYTES

__all__ = ["WHOLE", "Group", "Shard", "group_identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of every block a process has in HBM: part `member` of `members` equal ones."""

    member: int
    members: int

    def nbytes(self, slot_bytes: int) -> int:
        """Bytes of the part. Raises InvalidArgument where parts would not be whole pages."""
        if slot_bytes % (self.members * SLOT_ALIGN_BYTES):
            raise InvalidArgument(
                f"a block of {slot_bytes} bytes cannot be shared by {self.members} devices: parts must be whole "
                f"pages of {SLOT_ALIGN_BYTES} bytes; take larger blocks"
            )
        return slot_bytes // self.members

    def offset(self, slot_bytes: int) -> int:
        """Where the part begins in a whole block, in bytes."""
        return self.member * self.nbytes(slot_bytes)


WHOLE = Shard(member=0, members=1)
"""Of a session of one process."""


class Group(Protocol):
    """The other processes of a session, for the one that attaches it. The stream's thread calls again on a renewal."""

    @property
    def members(self) -> int:
        """Processes, this one included."""
        ...

    @property
    def uuids(self) -> Sequence[str]:
        """Of the other processes' devices, in their order (`tiers.base.Device.uuid`)."""
        ...

    @property
    def identities(self) -> Sequence[str]:
        """Of the other processes' devices, in their order (`tiers.base.Device.identity`)."""
        ...

    def join(self, path: str, token: bytes, slot_bytes: int, device: int) -> None:
        """Has each of them present itself on the descriptor socket at `path` as a member of the session of `token`.

        `device`: the number of the session's device in the service, under which the tables have all shards.
        Does not wait: they give shards of HBM while this process does. Raises: Unavailable where one has gone.
        """
        ...

    def wait_joined(self, num_pages: int) -> None:
        """Returns when each of them has mapped that many pages. Raises: Unavailable where one has gone or cannot."""
        ...

    def check(self) -> None:
        """Something has failed that needs all of them. Raises: Unavailable where one has gone."""
        ...


def group_identity(identities: Sequence[str]) -> str:
    """What must be equal for shards that earlier processes left to be believed: all devices, in their order."""
    digest = hashlib.blake2b("\0".join(identities).encode(), digest_size=16, person=b"kvstore.group")
    return f"group of {len(identities)} {digest.hexdigest()}"
