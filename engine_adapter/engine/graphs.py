"""Which batch sizes have a graph, and which of them a batch runs in. Pure.

A graph's shapes are fixed, so a batch is padded up to the next size that has one; sizes lie denser where padding would
cost relatively more.
"""

from bisect import bisect_left

__all__ = ["graph_sizes", "padded_size"]

_SMALL = (1, 2, 4, 8)


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th size up to 32, every 16th up to 128, every 32nd beyond; the last is `max_running`."""
    sizes = [size for size in _SMALL if size < max_running]
    size = _SMALL[-1]
    while size < max_running:
        size += 8 if size < 32 else 16 if size < 128 else 32
        sizes.append(min(size, max_running))
    return tuple(sizes) if sizes and sizes[-1] == max_running else (*sizes, max_running)


def padded_size(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of the ascending `sizes` that holds `count` requests; `count` is at most the largest."""
    return sizes[bisect_left(sizes, count)]
