"""The parts of one run of the `ttft` benchmark: daemon and engine, what is asked of them, and what comes of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import kvstore
from bench.asked import Answer, AskedWorker, Mark, Start, spawn_asked
from bench.service import Service, serve_in
from bench.timing import median
from bench.ttft_behind import Behind, LoadWay
from engine_adapter.engine.device import compute_dtype
from engine_adapter.engine.source import find_shape
from kvstore.errors import DeadlineExceeded
from kvstore.geometry import DTYPE_BYTES
from kvstore.units import parse_size, write_size

__all__ = ["LOAD_FACTOR", "Kill", "Part", "Samples", "TtftPlan", "TtftRow", "TtftRun"]

LOAD_FACTOR = 1.12
_PROMPTS = 2  # of each length; those of the longest put each other out of HBM
_WARM_SEED = 1000
_MAX_SPARE_PAGES = (
    256  # beside the longest prompt: what the daemon keeps free of a pool, up to a quarter of it
)
_MOSTLY = 0.5  # of the cached tokens
_SPARE_BYTES = 1 << 30
_SLAB_BYTES = 256 << 20
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftPlan:
    """Sizes of one run, in ascending order of length."""

    lengths: tuple[int, ...]
    new_tokens: int
    samples: int
    """Of each length and tier but disk, where each prompt is asked once."""
    chunk_tokens: int
    raw_bytes: int
    disk: str
    """Least capacity of the disk tier; it is as much more as everything needs, where the disk has room."""
    behind_lengths: tuple[int, ...] = ()
    """Prefixes from DRAM, among `lengths`, behind which `behind_tokens` are computed."""
    behind_tokens: int = 0
    behind_samples: int = 2
    """Of each of those lengths: what is computed takes room on the disk."""
    block_tokens: int = 32
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRow:
    """Medians over the samples of one length, in seconds; None where no sample came from that tier.

    `load_bytes`: what the samples of `dram_s` loaded; `load_bound_s`: what that may take. `equal`: every answer to a
    prompt that was cached, in whatever tier, had the same tokens; `equal_cold`: and those of the answer that was
    computed.
    """

    prompt_tokens: int
    recompute_s: float
    hbm_s: float | None
    dram_s: float | None
    disk_s: float | None
    recompute_over_dram: float | None
    load_bytes: int
    load_bound_s: float
    decode_step_s: float
    equal: bool
    equal_cold: bool
    samples: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a start."""

    doing: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """From `kill -9` of an engine process to the first token of the next one. `parts` in order; they add up to it.

    `beside`: what a thread did while other parts went on.
    """

    prompt_tokens: int
    cached_by_tier: Mapping[str, int]
    total_s: float
    parts: tuple[Part, ...]
    beside: tuple[Part, ...]
    ttft_s: float
    kv_s: float
    """Of `ttft_s`, what is not a decode step."""


@dataclass(slots=True)
class Samples:
    """Answers to the prompts of one length."""

    block_tokens: int
    cold: dict[int, Answer] = field(default_factory=dict)  # by the prompt's seed
    warm: dict[str, list[Answer]] = field(default_factory=lambda: {"hbm": [], "dram": [], "nvme": []})
    equal: bool = True
    equal_cold: bool = True
    first: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # tokens of a prompt's first cached answer

    def add(self, seed: int, answer: Answer) -> None:
        """Takes an answer to a prompt that was cached; it counts for the tier that most of it came from.

        HBM evicts what it must and no more: of a prompt that another one put out, the first blocks may be left there.
        """
        self.equal &= answer.token_ids == self.first.setdefault(seed, answer.token_ids)
        self.equal_cold &= answer.token_ids == self.cold[seed].token_ids
        most = (answer.prompt_tokens - 1) // self.block_tokens * self.block_tokens
        for tier, tokens in answer.cached_by_tier.items():
            if answer.cached_tokens == most and tokens >= _MOSTLY * most:
                self.warm[tier].append(answer)

    def seconds(self, tier: str) -> float | None:
        """Median time to the first token of those that came from `tier`."""
        times = [answer.ttft_s for answer in self.warm[tier]]
        return median(times) if times else None

    def loaded_tokens(self) -> float:
        """Median of what the samples of DRAM had to load."""
        tokens = [answer.cached_by_tier["dram"] for answer in self.warm["dram"]]
        return median(tokens) if tokens else 0.0


class TtftRun:
    """See the module. Made anew for each run; one thread."""

    def __init__(
        self,
        *,
        plan: TtftPlan,
        say: Callable[[str], None],
        folder: Path,
        model: str,
        device: str,
        extra: Mapping[str, str],
        row_done: Callable[[], None] = lambda: None,
    ) -> None:
        """`row_done` is called whenever more is known of a length."""
        self._row_done = row_done
        self._plan = plan
        self._say = say
        self._folder = folder
        self._model = model
        self._device = device
        self._extra = extra
        dtype = compute_dtype(device)
        config = find_shape(model).config
        self._slot_bytes = config.page_bytes(plan.block_tokens, DTYPE_BYTES[dtype])
        self._samples = {length: Samples(plan.block_tokens) for length in plan.lengths}
        self.behind = Behind(
            lengths=plan.behind_lengths,
            longest=plan.lengths[-1],
            new_tokens=plan.behind_tokens,
            samples=plan.behind_samples,
            token_bytes=self._slot_bytes / plan.block_tokens,
        )
        self._service: Service | None = None
        self._stored_blocks = 0
        self.disk_shortage = ""
        """Why not everything that was computed may be on disk; empty where all of it fits."""

    # ------------------------------------------------------------ processes

    @contextmanager
    def service(self) -> Iterator[None]:
        """A daemon over the run's folder; each finds on disk what the ones before wrote."""
        self._say("starting a daemon")
        dram = self._all_blocks() * self._slot_bytes * 5 // 4
        settings = {
            "hbm": write_size(self._pages() * self._slot_bytes * 5 // 4 + (64 << 20)),
            "min_slot": write_size(self._slot_bytes),
            "dram": write_size(-(-dram // (64 << 20)) * (64 << 20)),
            "nvme": f"{self._folder / 'nvme'}:{self._disk()}",
            "orphan_ttl": "15m",
        }
        with serve_in(self._folder, settings) as service:
            self._service = service
            try:
                yield
            finally:
                self._service = None

    @contextmanager
    def engine(self) -> Iterator[AskedWorker]:
        """A ready engine process over HBM of its own."""
        with self._spawn() as worker:
            worker.ready()
            yield worker

    def _spawn(self, way: LoadWay = LoadWay.GROUPED) -> AbstractContextManager[AskedWorker]:
        assert self._service is not None
        flags = {
            "socket": str(self._service.socket),
            "worker.model": self._model,
            "worker.load_format": "dummy",
            "worker.device": self._device,
            "worker.hbm": write_size(self._pages() * self._slot_bytes),
            "worker.block_tokens": str(self._plan.block_tokens),
            "worker.chunk_tokens": str(self._plan.chunk_tokens),
            "worker.layer_groups": way.value,
            "worker.load": "always",  # the rows are of loads, whether or not computing is sooner
            **self._extra,
        }
        self._say("starting an engine")
        return spawn_asked(flags, self._folder / "engine.log", self._plan.timeout_s)

    # ------------------------------------------------------------ what is asked

    def cold_and_hbm(self, engine: AskedWorker) -> None:
        """Every prompt once, which computes it, and then again from HBM."""
        self._ask(engine, self._plan.lengths[0], _WARM_SEED)
        self._stored_blocks += self._plan.lengths[0] // self._plan.block_tokens
        for length, samples in self._samples.items():
            for seed in range(_PROMPTS):
                self._say(f"{length:,} tokens: recompute, then from HBM")
                samples.cold[seed] = self._ask(engine, length, seed)
                for _ in range(self._plan.samples):
                    samples.add(seed, self._ask(engine, length, seed))
                self._stored_blocks += length // self._plan.block_tokens
                self._await_dram()
            self._row_done()

    def dram(self, engine: AskedWorker) -> None:
        """Prompts that were put out of HBM by the longest ones, which are samples too."""
        longest = self._plan.lengths[-1]
        for length, samples in self._samples.items():
            for sample in range(self._plan.samples):
                self._say(f"{length:,} tokens: from DRAM")
                for seed in range(_PROMPTS):
                    self._samples[longest].add(seed, self._ask(engine, longest, seed))
                if length != longest:
                    seed = sample % _PROMPTS
                    samples.add(seed, self._ask(engine, length, seed))
            self._row_done()

    def loads_behind(self, engine: AskedWorker, way: LoadWay) -> None:
        """Prefixes from DRAM with much to compute behind them. The prompt that `after_kill` asks is in HBM then."""
        if not self._plan.behind_lengths:
            return

        def ask(length: int, seed: int, new_tokens: int, new_seed: int) -> Answer:
            return self._ask(engine, length, seed, new_tokens, new_seed)

        self._say(f"{self._plan.behind_tokens:,} tokens behind a prefix from DRAM, layer groups {way.value}")
        self.behind.measure(way, ask)
        self._ask(engine, self._plan.lengths[-1], _PROMPTS - 1)
        self._row_done()

    def after_kill(self, killed_at: float) -> Kill:
        """What a new engine process does until it has answered the prompt that the killed one had in HBM last.

        Then, with loads that are awaited as a whole, `loads_behind`.
        """
        longest, seed = self._plan.lengths[-1], _PROMPTS - 1
        ended_at = time.monotonic()
        with self._spawn(LoadWay.WHOLE) as engine:
            start = engine.ready()
            answer = self._ask(engine, longest, seed)
            self.loads_behind(engine, LoadWay.WHOLE)
        self._samples[longest].add(seed, answer)
        return Kill(
            prompt_tokens=longest,
            cached_by_tier=answer.cached_by_tier,
            total_s=answer.first_token_at - killed_at,
            parts=_parts(killed_at, ended_at, start, answer),
            beside=tuple(Part(doing=doing, seconds=seconds) for doing, seconds in start.beside.items()),
            ttft_s=answer.ttft_s,
            kv_s=answer.ttft_s - answer.step_s,
        )

    def disk(self, engine: AskedWorker) -> None:
        """Every prompt once, from the files alone."""
        for length, samples in self._samples.items():
            for seed in range(_PROMPTS):
                self._say(f"{length:,} tokens: from disk")
                samples.add(seed, self._ask(engine, length, seed))
            self._row_done()

    def flush(self) -> None:
        """Waits until everything is on disk."""
        self._say("writing everything to disk")
        assert self._service is not None
        with kvstore.connect(self._service.socket) as client:
            pending = client.flush(self._plan.timeout_s).pending_blocks
        if pending:
            raise DeadlineExceeded(f"{pending} blocks did not reach the disk in {self._plan.timeout_s:g} s")

    def _ask(
        self, engine: AskedWorker, length: int, seed: int, more_tokens: int = 0, more_seed: int = 0
    ) -> Answer:
        # Prompts of different lengths share no first block.
        return engine.ask(
            tokens=length,
            seed=seed + length,
            new_tokens=self._plan.new_tokens,
            question_tokens=more_tokens,
            question_seed=more_seed,
        )

    def _await_dram(self) -> None:
        """Until every full block that was computed is in DRAM too: before, nothing may put it out of HBM."""
        assert self._service is not None
        deadline = time.monotonic() + self._plan.timeout_s
        with kvstore.connect(self._service.socket) as client:
            while True:
                sealed = [tier.sealed_slots for tier in client.stats().tiers if tier.tier == "dram"]
                if sealed[0] >= self._stored_blocks:
                    return
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{sealed[0]} of {self._stored_blocks} blocks reached DRAM in {self._plan.timeout_s:g} s"
                    )
                time.sleep(_POLL_S)

    # ------------------------------------------------------------ sizes and results

    def _blocks(self, length: int) -> int:
        """Blocks of a prompt and its answer."""
        return -(-(length + self._plan.new_tokens) // self._plan.block_tokens) + 1

    def _all_blocks(self) -> int:
        """Blocks of everything that is asked."""
        prompts = sum(_PROMPTS * self._blocks(length) for length in self._plan.lengths)
        return prompts + self._blocks(self.behind.asked_tokens)

    def _pages(self) -> int:
        """HBM pages: one prompt of the longest kind, the slots that a session keeps in hand, and those kept free.

        So a prompt stays whole when it has been answered, and another one of its kind puts most of it out.
        """
        prompt = self._blocks(self._plan.lengths[-1] + self._plan.behind_tokens)
        needed = prompt + min(_MAX_SPARE_PAGES, prompt // 3)
        return needed + min(256, max(4, needed // 14))

    def _disk(self) -> str:
        """Capacity of the disk tier: what everything needs, or what the disk has room for; see `disk_shortage`."""
        self._folder.mkdir(exist_ok=True)
        free = shutil.disk_usage(self._folder).free + _used_bytes(self._folder) - _SPARE_BYTES
        # A slab has a trailer for each slot and no part of one at its end; the index takes a hundredth.
        needed = self._all_blocks() * self._slot_bytes * 17 // 16 * 100 // 98 + 2 * _SLAB_BYTES
        wanted = max(parse_size(self._plan.disk), -(-needed // _SLAB_BYTES) * _SLAB_BYTES)
        given = wanted if wanted <= free else max(64 << 20, free // _SLAB_BYTES * _SLAB_BYTES)
        self.disk_shortage = (
            f"the disk has room for {write_size(given)} of {write_size(wanted)}: "
            "prompts that it let go of are not counted"
            if given < wanted
            else ""
        )
        return write_size(given)

    def rows(self, raw_bytes_per_s: float) -> Iterator[TtftRow]:
        """One a length that was asked so far."""
        for length, samples in self._samples.items():
            if not samples.cold:
                continue
            loaded = int(samples.loaded_tokens() / self._plan.block_tokens * self._slot_bytes)
            answers = [answer for found in samples.warm.values() for answer in found]
            step_s = median([answer.step_s for answer in answers or list(samples.cold.values())])
            cold_s, dram_s = (
                median([answer.ttft_s for answer in samples.cold.values()]),
                samples.seconds("dram"),
            )
            yield TtftRow(
                prompt_tokens=length,
                recompute_s=cold_s,
                hbm_s=samples.seconds("hbm"),
                dram_s=dram_s,
                recompute_over_dram=None if dram_s is None else cold_s / dram_s,
                disk_s=samples.seconds("nvme"),
                load_bytes=loaded,
                load_bound_s=LOAD_FACTOR * loaded / raw_bytes_per_s + step_s,
                decode_step_s=step_s,
                equal=samples.equal,
                equal_cold=samples.equal_cold,
                samples={tier: len(found) for tier, found in samples.warm.items()},
            )


def _parts(killed_at: float, ended_at: float, start: Start, answer: Answer) -> tuple[Part, ...]:
    """What the time from a kill to the first token went into, in order."""
    asked_at = answer.first_token_at - answer.ttft_s
    moments = [
        Mark(doing="end of the killed process", at=killed_at),
        Mark(doing="process start and imports", at=ended_at),
        *start.marks[:-1],
        Mark(doing="being asked", at=start.marks[-1].at),
        Mark(doing="first token", at=asked_at),
        Mark(doing="", at=answer.first_token_at),
    ]
    return tuple(
        Part(doing=mark.doing, seconds=following.at - mark.at) for mark, following in pairwise(moments)
    )


def _used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
