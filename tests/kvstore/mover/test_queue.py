"""Which job an I/O thread takes next."""

from __future__ import annotations

from kvstore.mover.queue import WorkQueue


def test_reads_overtake_writes_and_writes_are_not_starved() -> None:
    queue = WorkQueue(most=2)
    taken: list[str] = []
    for i in range(20):
        queue.put_write(lambda i=i: taken.append(f"w{i}"))  # type: ignore[misc]
        queue.put_read(lambda i=i: taken.append(f"r{i}"))  # type: ignore[misc]
    queue.put_sync(lambda: taken.append("sync"))
    for _ in range(10):
        job = queue.get()
        assert job is not None
        job()
        if taken[-1].startswith("r"):
            queue.read_done()
    assert taken == ["sync", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "w0", "r7"]
    queue.close()
    assert queue.get() is None


def test_a_read_finds_a_thread_while_writes_run() -> None:
    """Prefetched writes to a slow disk took every thread, and a request waited for all of them."""
    queue = WorkQueue(most=1)
    taken: list[str] = []
    for name in ("w0", "w1"):
        queue.put_write(lambda name=name: taken.append(name))  # type: ignore[misc]
    for _ in range(2):
        job = queue.get()
        assert job is not None
        job()
        if taken == ["w0"]:
            queue.put_read(lambda: taken.append("r0"))
    assert taken == ["w0", "r0"]
    queue.write_done()
    job = queue.get()
    assert job is not None
    job()
    assert taken == ["w0", "r0", "w1"]


def test_a_write_finds_a_thread_while_reads_run() -> None:
    """Reads that a slow or throttled disk held took every thread, and nothing was written down."""
    queue = WorkQueue(most=1)
    taken: list[str] = []
    for name in ("r0", "r1"):
        queue.put_read(lambda name=name: taken.append(name))  # type: ignore[misc]
    queue.put_write(lambda: taken.append("w0"))
    for _ in range(2):
        job = queue.get()
        assert job is not None
        job()
    assert taken == ["r0", "w0"]
    assert queue.get_now() is None
    queue.read_done()
    job = queue.get()
    assert job is not None
    job()
    assert taken == ["r0", "w0", "r1"]
