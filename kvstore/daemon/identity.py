"""Whether HBM is believed: a digest of the device that its blocks were written on, kept with each extent."""

from __future__ import annotations

import hashlib

from kvstore.errors import InvalidArgument

__all__ = ["DISTRUSTED", "NOT_STATED", "device_digest"]

NOT_STATED = 0
"""Of a client that names no identity: one like any other."""
DISTRUSTED = (1 << 64) - 1
"""Of an extent that no later session may have, whatever its device."""
_MAX_IDENTITY_BYTES = 256


def device_digest(identity: str, members: int = 1) -> int:
    """64 bits of an identity. Raises InvalidArgument where it is too long.

    HBM of a group of `members` processes is for groups of as many: each has a shard of it.
    """
    encoded = identity.encode()
    if len(encoded) > _MAX_IDENTITY_BYTES:
        raise InvalidArgument(f"the identity of a device is longer than {_MAX_IDENTITY_BYTES} bytes")
    if members > 1:
        encoded += f" of {members} processes".encode()
    if not encoded:
        return NOT_STATED
    digest = hashlib.blake2b(encoded, digest_size=8, person=b"kvstore.device").digest()
    return int.from_bytes(digest, "little") % (DISTRUSTED - 1) + 1
