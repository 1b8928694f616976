"""What `kvstore status` says, from replies that no service gave."""

from __future__ import annotations

from kvstore.cli.status import _read_ahead


def test_what_was_read_ahead_is_said_by_who_wished_for_it() -> None:
    counters = {
        "prefetch_useful_bytes": 3 << 30,
        "prefetch_late_bytes": 1 << 20,
        "next_turn_wasted_bytes": 4096,
    }
    assert _read_ahead(counters) == (
        "read ahead: for queued requests 3GiB in time, 1MiB late, 0B for nothing; "
        "for the next turn of conversations 0B in time, 0B late, 4KiB for nothing\n"
    )


def test_where_nothing_was_read_ahead_nothing_is_said() -> None:
    assert _read_ahead({"prefetches": 0}) == ""
