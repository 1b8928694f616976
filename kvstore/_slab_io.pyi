# Compiled from kvstore/native/slab_io.c; absent where there was no C compiler when kvstore was built.
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def transfer(
    fd: int,
    slots: int,
    slot_bytes: int,
    moves: NDArray[np.void],
    bases: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    scratch: memoryview,
    written_ms: int,
    replies: NDArray[Any],
    faults: NDArray[np.int32],
    window: int,
) -> int: ...
def arrange(
    moves: NDArray[np.void], shares: int, piece_bytes: int, call_bytes: int, arranged: NDArray[np.void], /
) -> list[tuple[int, int]]: ...
def is_queued(fd: int, data: Buffer, /) -> bool: ...
def checksum(data: Buffer, how: str = ..., /) -> bytes: ...
