# Compiled from kvstore/native/summed_copy.c; absent where there was no C compiler when kvstore was built.
import numpy as np
from numpy.typing import NDArray

def copy(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    nbytes: int,
    sums: NDArray[np.uint64],
    how: str = ...,
    /,
) -> None: ...
