"""Prefetch on the virtual clock, over the real store: it cannot thrash DRAM, and it is worth having."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulate.hardware import Hardware, Model, model_of
from bench.simulate.serving import Served, Serving
from bench.simulate.tiered import Sizes
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

BLOCK_TOKENS = 16
ON, OFF = 0.5, 0.0


def documents(count: int, blocks: int, rounds: int, answer_tokens: int, seed: int | None) -> Trace:
    """Each is asked once, a minute apart; then all at once, so many times over, in some order; None: in the same."""
    builder, time_ms = TraceBuilder(), 0

    def ask(document: int) -> None:
        ids = range(document * blocks, (document + 1) * blocks)
        tokens = BLOCK_TOKENS * blocks
        turn = Turn(
            time_ms=time_ms, ids=ids, prompt_tokens=tokens, output_tokens=answer_tokens, session=document
        )
        builder.add(turn)

    for document in range(count):
        ask(document)
        time_ms += 60_000
    order = np.random.default_rng(seed)
    for _ in range(rounds):
        for document in order.permutation(count).tolist() if seed is not None else range(count):
            ask(document)
    return builder.build("documents", BLOCK_TOKENS, Pacing.TRACE)


def model(disk_bytes_per_s: float) -> Model:
    hardware = Hardware(disk_read_bytes_per_s=disk_bytes_per_s, disk_write_bytes_per_s=disk_bytes_per_s)
    return model_of("llama-3.1-8b", hardware)


def serve(trace: Trace, served_by: Model, hbm: int, dram: int, share: float, running: int) -> Served:
    slot_bytes = served_by.token_bytes * BLOCK_TOKENS
    sizes = Sizes(
        slot_bytes=slot_bytes,
        hbm_bytes=hbm * slot_bytes,
        dram_bytes=dram * slot_bytes,
        nvme_bytes=2 * trace.unique_blocks * (slot_bytes + 4096),
    )
    serving = Serving(trace, served_by, sizes, None, 1.0, prefetch_share=share, max_running=running)
    served = serving.run()
    assert serving.store.check_integrity() == []
    assert all(tier.held_slots == 0 for tier in serving.store.stats().tiers)
    assert len(serving.store._state.queued) == 0
    return served


def seconds(served: Served) -> float:
    """From the moment when all ask at once to the last first token: those asked alone before wait for less."""
    return float(served.ttft_s.max())


@pytest.mark.parametrize("running", [2, 16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_waiting_long_requests_than_dram_holds_lose_nothing_by_prefetch(running: int, seed: int) -> None:
    """48 requests for 16 documents of which DRAM holds three: goodput is at least 0.95 of that without prefetch."""
    count, blocks = 16, 512
    trace, served_by = documents(count, blocks, 3, 32, seed), model(1e9)
    off, on = (serve(trace, served_by, 1200, 3 * blocks + 40, share, running) for share in (OFF, ON))
    assert on.counters["prefetch_wasted_bytes"] == 0
    assert seconds(on) * 0.95 <= seconds(off)


@pytest.mark.parametrize("seed", [1, 2, 7, 8])
def test_what_was_read_ahead_for_one_that_waits_is_not_lost_to_those_behind_it(seed: int) -> None:
    """A request that asked while its blocks were on their way lost them to those behind it, and was served last: the
    goodput of these orders was 0.94, 0.88, 0.94 and 0.74 of that without prefetch."""
    blocks = 64
    trace, served_by = documents(16, blocks, 3, 32, seed), model(1e9)
    off, on = (serve(trace, served_by, 300, 4 * blocks, share, 4) for share in (OFF, ON))
    assert seconds(on) * 0.95 <= seconds(off)


@pytest.mark.parametrize("answer_tokens, disk_bytes_per_s", [(256, 2e8), (96, 3e8), (32, 5e8), (96, 1e9)])
def test_a_queue_that_turns_over_dram_and_most_of_hbm_loses_nothing(
    answer_tokens: int, disk_bytes_per_s: float
) -> None:
    """The thrash of `kvstore bench prefetch`. What a queued request had lost in HBM was passed over: what others behind
    it want was read into the room that it needed. Goodput was 0.92 in the first of these."""
    blocks = 128
    trace, served_by = documents(8, blocks, 2, answer_tokens, None), model(disk_bytes_per_s)
    hbm = 6 * (blocks + answer_tokens // BLOCK_TOKENS + 1)
    off, on = (serve(trace, served_by, hbm, 2 * blocks, share, 4) for share in (OFF, ON))
    assert seconds(on) * 0.95 <= seconds(off)


def test_a_disk_reads_at_once_what_a_request_asks_for_and_nothing_else_happens() -> None:
    """It stood still until the request asked again, 5 s later, which is not what a mover does."""
    trace = documents(2, 32, 1, 4, 1)
    assert seconds(serve(trace, model(1e9), 64, 40, OFF, 1)) < 0.1


def test_waiting_requests_do_not_push_each_others_blocks_out_of_dram() -> None:
    """Each read what the next one evicted before it was used: 505 GB through the disk for documents of 13 GB."""
    count, blocks, rounds = 16, 256, 3
    trace, served_by = documents(count, blocks, rounds, 4, 1), model(1e9)
    for share in (OFF, ON):
        served = serve(trace, served_by, 600, 3 * blocks, share, 256)
        once = count * blocks * served_by.token_bytes * BLOCK_TOKENS
        assert served.moved_bytes["nvme_to_dram"] <= rounds * once
        assert sum(served.hit_blocks.values()) >= 0.95 * rounds * count * (blocks - 1)


def test_what_waits_for_a_place_is_read_meanwhile() -> None:
    """One request at a time, and a disk that takes about as long as it: reading and answering overlap."""
    count, blocks = 12, 256
    trace, served_by = documents(count, blocks, 1, 64, 1), model(1e9)
    off, on = (serve(trace, served_by, 600, 1000, share, 1) for share in (OFF, ON))
    assert off.counters["prefetch_useful_bytes"] == 0
    assert on.counters["prefetch_useful_bytes"] > 0.9 * on.moved_bytes["nvme_to_dram"]
    assert on.counters["prefetch_wasted_bytes"] == 0
    assert seconds(on) < 0.7 * seconds(off)
