"""What the daemon gives to `kvstore record`, and what other sizes of DRAM would hit of what it is asked for."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kvstore.cli.status import _render
from kvstore.daemon.recording import Recording
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service
from tests.support.raw_client import BLOCK_TOKENS, RawClient

Make = Callable[[], RawClient]


def take(service: Service) -> pb.RecordReply:
    reply = service.call("Record", pb.RecordRequest(), service="admin")
    assert isinstance(reply, pb.RecordReply)
    return reply


def chain(blocks: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 1 << 63, (blocks, 2), dtype=np.uint64)


def note(recording: Recording, hashes: NDArray[np.uint64], now_ms: int = 1) -> None:
    recording.note(now_ms, session=0, namespace=0, block_tokens=4, hashes=hashes)


def test_prompts_are_recorded_once_each_while_somebody_takes_them(client: Make, service: Service) -> None:
    one = client().begin()
    before = one.chain(range(20))
    one.acquire(before, lease=1)  # nobody records yet
    assert list(take(service).prompts) == []
    asked = one.chain(range(40))
    one.acquire(asked, lease=2)
    one.acquire(asked, lease=2)  # the same request again
    one.acquire(one.chain(range(8)), lease=3)
    reply = take(service)
    assert [prompt.hashes for prompt in reply.prompts] == [asked.tobytes(), one.chain(range(8)).tobytes()]
    assert {prompt.block_tokens for prompt in reply.prompts} == {BLOCK_TOKENS}
    assert reply.missed == 0
    assert list(take(service).prompts) == []
    service.call("Record", pb.RecordRequest(stop=True), service="admin")
    one.acquire(one.chain(range(12)), lease=4)
    assert list(take(service).prompts) == []
    service.call("Record", pb.RecordRequest(stop=True), service="admin")


def test_stats_have_the_curve_of_dram(client: Make, service: Service) -> None:
    one = client().begin()
    for lease in range(1, 30):
        one.acquire(one.chain(range(512)), lease=lease)
    stats = service.stats()
    sizes = [point.dram_bytes for point in stats.dram_curve]
    dram = next(tier for tier in stats.tiers if tier.tier == "dram")
    assert sizes == [int(scale * dram.capacity_bytes) for scale in (0.5, 1, 2, 4)]
    assert all(0 < point.hit_rate <= 1 for point in stats.dram_curve)


def test_status_says_what_more_dram_would_bring() -> None:
    described = pb.DescribeReply(version="1", pid=7)
    tiers = [pb.TierStats(tier="dram", capacity_bytes=8 << 30, allocated_bytes=8 << 30)]
    rates = {4: 0.3, 8: 0.41, 16: 0.48, 32: 0.48}
    curve = [pb.SizePoint(dram_bytes=size << 30, hit_rate=rate) for size, rate in rates.items()]
    console = Console(file=io.StringIO(), width=200)
    console.print(
        _render(described, pb.StatsReply(ready=True, tiers=tiers, dram_curve=curve), every_counter=False)
    )
    assert isinstance(console.file, io.StringIO)
    shown = " ".join(console.file.getvalue().split())
    assert "DRAM of 8GiB alone would hit 41.0%" in shown
    assert "with 4GiB -11.0 points, with 16GiB +7.0 points, with 32GiB +7.0 points" in shown


def test_nothing_is_kept_until_somebody_takes_it() -> None:
    recording = Recording()
    assert not recording.running(0)
    assert list(recording.take(0).prompts) == []
    assert recording.running(29_999)


def test_an_abandoned_recording_ends_and_lets_go() -> None:
    """A `record` that was killed must not fill the daemon for ever."""
    recording = Recording()
    recording.take(0)
    note(recording, chain(100))
    assert not recording.running(30_001)
    assert list(recording.take(30_002).prompts) == []


def test_what_is_not_taken_in_time_is_counted() -> None:
    recording = Recording()
    recording.take(0)
    long = chain(8192)
    for _ in range(300):  # of 128 KiB each
        note(recording, long)
    taken = []
    while prompts := recording.take(1).prompts:
        assert sum(len(prompt.hashes) for prompt in prompts) <= (2 << 20) + len(long.tobytes())
        taken += prompts
    assert recording.take(1).missed == 300 - len(taken) > 0
    assert len(taken) * len(long.tobytes()) <= 16 << 20
