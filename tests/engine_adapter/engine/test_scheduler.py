"""The scheduler alone: no model runs, a sampled token is a number."""

from collections.abc import Sequence

import pytest

from engine_adapter.base import Admission, BlockManager, RequestId
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.request import UNKNOWN, Chunk, Request
from engine_adapter.engine.scheduler import Scheduler, SchedulerConfig
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks

BLOCK = 16


def plain(num_pages: int = 64) -> PlainBlockManager:
    return PlainBlockManager(num_pages=num_pages, page_bytes=64, block_tokens=BLOCK)


def cache(num_pages: int = 64) -> PrefixCacheBlocks:
    return PrefixCacheBlocks(num_pages=num_pages, page_bytes=64, block_tokens=BLOCK)


def scheduler(blocks: BlockManager, **bounds: int) -> Scheduler:
    defaults = {"max_batch_tokens": 80, "max_running": 8}
    return Scheduler(SchedulerConfig(**{**defaults, **bounds}), blocks)


def request(name: str, tokens: Sequence[int] | int) -> Request:
    listed = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return Request(id=RequestId(name), tokens=listed, num_prompt=len(listed))


class Driver:
    """Plays the engine: computes nothing, samples 1000 + n, finishes a request after `answer` tokens."""

    def __init__(self, subject: Scheduler, answer: int = 5) -> None:
        self.subject = subject
        self.answer = answer
        self.steps: list[list[Chunk]] = []
        self.finished: list[str] = []

    def step(self) -> list[Chunk]:
        chunks = self.subject.schedule()
        for chunk in chunks:
            assert chunk.start == chunk.request.num_computed < chunk.end
        assert len({chunk.request.id for chunk in chunks}) == len(chunks)
        self.subject.launched(chunks)
        self.complete(chunks)
        self.steps.append(chunks)
        return chunks

    def complete(self, chunks: list[Chunk]) -> None:
        chosen = [1000 + chunk.end - chunk.request.num_prompt for chunk in chunks if chunk.samples]
        for chunk in self.subject.complete(chunks, chosen):
            if chunk.end + 1 - chunk.request.num_prompt == self.answer:
                self.subject.remove(chunk.request)
                self.finished.append(chunk.request.id)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            stats = self.subject.stats()
            if not stats.waiting + stats.running:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.subject.stats()}")


def spans(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.end) for chunk in chunks]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    driver = Driver(scheduler(plain()))
    driver.subject.add(request("short", 10))
    assert spans(driver.step()) == [("short", 0, 10)]
    driver.subject.add(request("long", 200))
    assert spans(driver.step()) == [("short", 10, 11), ("long", 0, 79)]
    assert spans(driver.step()) == [("short", 11, 12), ("long", 79, 158)]
    assert spans(driver.step()) == [("short", 12, 13), ("long", 158, 200)]
    driver.run()
    assert driver.finished == ["short", "long"]


def test_chunks_end_on_the_grid_in_deterministic_mode() -> None:
    driver = Driver(scheduler(plain(), grid_tokens=64, max_batch_tokens=150))
    driver.subject.add(request("a", 200))
    driver.subject.add(request("b", 100))
    assert spans(driver.step()) == [("a", 0, 128)]
    assert spans(driver.step()) == [("a", 128, 200), ("b", 0, 64)]
    assert spans(driver.step()) == [("a", 200, 201), ("b", 64, 100)]


@pytest.mark.parametrize("length", [2 * BLOCK, BLOCK - 1, 2 * BLOCK + 1, 1])
def test_prompts_at_block_boundaries(length: int) -> None:
    """A prompt of exactly k blocks left no token to compute on a full hit; shorter than a block has nothing to hit."""
    blocks = cache()
    for again in range(2):
        driver = Driver(scheduler(blocks))
        prompt = request("r", length)
        driver.subject.add(prompt)
        driver.step()
        assert prompt.admission is not None
        assert prompt.admission.cached_tokens == again * ((length - 1) // BLOCK * BLOCK)
        driver.run()
        blocks.check_integrity()
    assert len(blocks.sealed) == (length + driver.answer - 1) // BLOCK


def test_64_requests_with_one_system_prompt_compute_it_once() -> None:
    """Elsewhere 64 requests that arrive together each computed the same prefix."""
    blocks = cache(num_pages=600)
    driver = Driver(scheduler(blocks, max_running=64, max_batch_tokens=300))
    system = list(range(20 * BLOCK))
    for i in range(64):
        driver.subject.add(request(f"r{i}", [*system, 5000 + i, 6000 + i]))
    driver.run()
    assert blocks.computed_tokens == len(system) + 64 * 2
    assert len(driver.finished) == 64
    blocks.check_integrity()


def test_the_one_that_computes_a_prefix_is_aborted_and_another_takes_over() -> None:
    blocks = cache()
    driver = Driver(scheduler(blocks))
    first, second = request("first", 200), request("second", 200)
    driver.subject.add(first)
    driver.subject.add(second)
    assert spans(driver.step()) == [("first", 0, 80)]
    driver.subject.remove(first)
    assert spans(driver.step()) == [("second", 80, 160)]  # what was sealed is a hit, the rest is its own now
    driver.run()
    blocks.check_integrity()


def test_the_newest_request_is_preempted_and_computed_again() -> None:
    blocks = plain(num_pages=7)
    driver = Driver(scheduler(blocks), answer=40)
    requests = [request("old", 40), request("new", 40)]
    for item in requests:
        driver.subject.add(item)
    driver.run()
    assert driver.finished == ["old", "new"]
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions >= 1
    assert [len(item.tokens) for item in requests] == [80, 80]
    blocks.check_integrity()


def test_preemption_keeps_what_was_sealed() -> None:
    blocks = cache(num_pages=9)
    driver = Driver(scheduler(blocks), answer=60)
    for name, start in (("old", 0), ("new", 500)):
        driver.subject.add(request(name, list(range(start, start + 40))))
    driver.run()
    blocks.check_integrity()
    assert driver.subject.stats().preemptions_total >= 1
    recomputed = blocks.computed_tokens - 80
    assert 0 < recomputed < 100  # the prompt's full blocks were hits again


def test_a_request_is_never_both_preempted_and_run_in_one_step() -> None:
    """A preempted victim that stays in the batch writes into pages that are somebody else's already."""
    blocks = plain(num_pages=10)
    driver = Driver(scheduler(blocks), answer=30)
    requests = [request(f"r{i}", 16 * (1 + i % 3)) for i in range(6)]
    for item in requests:
        driver.subject.add(item)
    for _ in range(400):
        before = {item.id: item.num_preemptions for item in requests}
        chunks = driver.subject.schedule()
        for chunk in chunks:
            table = blocks.pages(chunk.request.id)
            assert len(table) * BLOCK >= chunk.end
            assert chunk.request.num_preemptions == before[chunk.request.id] or chunk.start == 0
        blocks.check_integrity()
        driver.subject.launched(chunks)
        driver.complete(chunks)
    assert driver.subject.stats().running + driver.subject.stats().waiting == 0


class Refusing(PlainBlockManager):
    """Admits only requests whose id is not in `refused`."""

    refused: set[str]
    prepared: tuple[str, ...] = ()

    def prepare(self, request: RequestId) -> None:
        self.prepared += (request,)

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        return None if request in self.refused else super().admit(request, num_tokens)


def refusing(*names: str) -> Refusing:
    blocks = Refusing(num_pages=64, page_bytes=64, block_tokens=BLOCK)
    blocks.refused = set(names)
    return blocks


def test_a_request_that_is_not_admitted_yet_holds_nobody_up() -> None:
    blocks = refusing("loading")
    driver = Driver(scheduler(blocks))
    for name in ("loading", "a", "b"):
        driver.subject.add(request(name, 10))
    assert [chunk.request.id for chunk in driver.step()] == ["a", "b"]
    blocks.refused.clear()
    assert [chunk.request.id for chunk in driver.step()] == ["a", "b", "loading"]


def test_a_request_passed_over_too_often_is_next() -> None:
    """Without a bound a big request starves for as long as small ones keep coming."""
    blocks = refusing("big")
    driver = Driver(scheduler(blocks, patience=10), answer=2)
    driver.subject.add(request("big", 100))
    for i in range(40):
        driver.subject.add(request(f"small{i}", 20))
        driver.step()
    admitted = len(driver.finished) + driver.subject.stats().running
    assert admitted < 40
    for _ in range(5):
        driver.step()
    assert driver.subject.stats().running == 0
    blocks.refused.clear()
    assert driver.step()[0].request.id == "big"
    driver.run()
    assert len(driver.finished) == 41


def test_waiting_requests_keep_their_order_when_passed_over() -> None:
    blocks = refusing("a", "b", "c")
    driver = Driver(scheduler(blocks))
    for name in "abcd":
        driver.subject.add(request(name, 10))
    driver.step()
    blocks.refused.clear()
    assert [chunk.request.id for chunk in driver.step()] == ["d", "a", "b", "c"]


def test_requests_say_how_many_run_before_them() -> None:
    blocks = cache()
    driver = Driver(scheduler(blocks, max_running=2), answer=3)
    for name in "abc":
        driver.subject.add(request(name, [ord(name)] * 20))
    assert list(blocks.ahead.values()) == [0, 1, 2]
    driver.step()
    driver.subject.add(request("d", 20))
    assert blocks.ahead[RequestId("d")] == 2  # c, and whoever makes room for it
    driver.run()


def test_the_front_of_the_queue_is_prepared_while_others_have_the_step() -> None:
    """Nothing of a waiting request was loaded before there was a place for it, and then the step went without it."""
    blocks = cache()
    driver = Driver(scheduler(blocks, max_running=1), answer=3)
    for number in range(7):
        driver.subject.add(request(f"r{number}", [number] * 20))
    driver.step()
    assert blocks.prepared == ["r1", "r2", "r3", "r4"]
    driver.run()


def test_nothing_is_prepared_behind_a_request_that_lacks_something() -> None:
    blocks = refusing("a")
    driver = Driver(scheduler(blocks, max_running=1), answer=9)
    for name in "abc":
        driver.subject.add(request(name, 20))
    driver.step()
    assert blocks.prepared == ()
    blocks.refused.clear()
    driver.step()
    assert blocks.prepared == ("b", "c")


def test_queues_and_questions_are_bounded() -> None:
    blocks = cache()
    subject = scheduler(blocks, max_waiting=30, max_running=4)
    assert all(subject.add(request(f"r{i}", list(range(40)))) for i in range(30))
    assert not subject.add(request("one too many", 10))
    subject.schedule()
    assert blocks.calls.count("admit") <= 5
    assert "wait" not in blocks.calls


def test_decoding_commits_only_when_a_block_is_full() -> None:
    blocks = cache()
    driver = Driver(scheduler(blocks), answer=40)
    driver.subject.add(request("r", 10))
    driver.run()
    assert blocks.calls.count("commit") == 3


def test_removing_a_waiting_request_releases_it() -> None:
    blocks = refusing("a")
    subject = scheduler(blocks)
    waiting = request("a", 10)
    subject.add(waiting)
    subject.schedule()
    subject.remove(waiting)
    assert subject.stats().waiting == 0
    blocks.check_integrity()


@pytest.mark.parametrize("bounds", [{"max_batch_tokens": 8}, {"patience": 0}, {"grid_tokens": 0}])
def test_bounds_that_could_stop_a_prefill_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        scheduler(plain(), **bounds)


def test_a_step_is_scheduled_while_the_one_before_it_runs() -> None:
    blocks = cache()
    driver = Driver(scheduler(blocks), answer=20)
    prompt = request("r", 30)
    prompt.limit_tokens = 50
    driver.subject.add(prompt)
    first = driver.subject.schedule()
    driver.subject.launched(first)
    assert prompt.tokens[-1] == UNKNOWN
    second = driver.subject.schedule()
    assert spans(second) == [("r", 30, 31)]
    driver.subject.launched(second)
    assert "commit" not in blocks.calls
    driver.complete(first)
    assert prompt.tokens[-2:] == [1000, UNKNOWN]
    assert blocks.calls.count("commit") == 1
    assert list(blocks.sealed) == [tuple(range(16))]
    driver.complete(second)
    assert prompt.tokens[-2:] == [1000, 1001]
    driver.run()
    assert driver.finished == ["r"]


def test_nothing_is_scheduled_beyond_where_a_request_ends_for_sure() -> None:
    driver = Driver(scheduler(plain()), answer=1)
    prompt = request("r", 10)
    prompt.limit_tokens = 11
    driver.subject.add(prompt)
    first = driver.subject.schedule()
    driver.subject.launched(first)
    assert driver.subject.schedule() == []
    driver.complete(first)
    assert driver.finished == ["r"]


def test_a_request_is_preempted_when_its_step_has_ended() -> None:
    """Pages that a kernel still writes must not be given to anybody."""
    blocks = plain(num_pages=4)
    driver = Driver(scheduler(blocks), answer=30)
    old, new = request("old", 31), request("new", 31)
    for item in (old, new):
        driver.subject.add(item)
    first = driver.subject.schedule()
    driver.subject.launched(first)
    second = driver.subject.schedule()  # 32 tokens each: the last that the pages hold
    driver.subject.launched(second)
    driver.complete(first)
    third = driver.subject.schedule()  # none has a page for its 33rd: the newest gives way, when it may
    assert third == []
    assert new.num_preemptions == 1
    assert len(blocks.pages(new.id)) == 2
    assert driver.subject.stats().waiting == 1
    assert driver.subject.schedule() == []
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)  # one is enough
    driver.complete(second)
    assert new.tokens[-2:] == [1000, 1001]
    blocks.check_integrity()
    assert spans(driver.subject.schedule()) == [("old", 32, 33)]


def test_a_removed_request_leaves_when_its_step_has_ended() -> None:
    blocks = plain()
    driver = Driver(scheduler(blocks))
    gone = request("r", 10)
    driver.subject.add(gone)
    chunks = driver.subject.schedule()
    driver.subject.launched(chunks)
    driver.subject.remove(gone)
    assert driver.subject.is_leaving(gone.id)
    assert len(blocks.pages(gone.id)) == 1
    assert driver.subject.complete(chunks, [7]) == []
    assert not driver.subject.is_leaving(gone.id)
    blocks.check_integrity()
    assert len(blocks._tables) == 0
