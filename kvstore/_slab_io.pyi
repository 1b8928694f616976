# Compiled from kvstore/native/slab_io.c; absent where there was no C compiler when kvstore was built.
from typing_extensions import Buffer

def transfer(
    fd: int,
    kind: int,
    moves: Buffer,
    addresses: Buffer,
    scratch: Buffer,
    written_ms: int,
    replies: Buffer,
    faults: Buffer,
) -> None: ...
def checksum(data: Buffer) -> bytes: ...
