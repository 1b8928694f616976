"""The rows of `ttft` in which much is computed behind a prefix that comes from DRAM: in groups of layers, and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from bench.asked import Answer
from bench.timing import median

__all__ = ["AskBehind", "Behind", "BehindRow", "LoadWay"]

_MOSTLY = 0.75  # of the prefix
_FIRST_SEED = 10_000  # of what is asked behind: each time something else, since it is cached too


class LoadWay(StrEnum):
    """How an engine process loads, by `worker.layer_groups`."""

    GROUPED = "auto"
    WHOLE = "off"


AskBehind = Callable[[int, int, int, int], Answer]
"""Asks a prompt of (tokens, seed) with (new tokens, their seed) behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindRow:
    """Medians of seconds to the first token, None where no sample came from there.

    `grouped_s` and `whole_s`: from DRAM, with layer groups where they pay and without; `hbm_s`: what computing alone
    takes. `load_bytes`: of the prefix.
    """

    prefix_tokens: int
    new_tokens: int
    grouped_s: float | None
    whole_s: float | None
    hbm_s: float | None
    grouped_over_whole: float | None
    load_bytes: int
    samples: Mapping[str, int]


@dataclass(slots=True)
class _Times:
    by_way: dict[LoadWay, list[float]] = field(default_factory=lambda: {way: [] for way in LoadWay})
    hbm: list[float] = field(default_factory=list)


class Behind:
    """Takes the samples; one engine process after the other."""

    def __init__(
        self, *, lengths: tuple[int, ...], longest: int, new_tokens: int, samples: int, token_bytes: float
    ) -> None:
        """`longest`: prompts of that length put each other, and all others, out of HBM."""
        self._longest = longest
        self._new_tokens = new_tokens
        self._samples = samples
        self._token_bytes = token_bytes
        self._times = {length: _Times() for length in lengths}
        self._seeds = count(_FIRST_SEED)

    @property
    def asked_tokens(self) -> int:
        """New tokens of everything that is asked, by all ways: all of them go to DRAM and to the disk, too."""
        return (len(LoadWay) + 1) * len(self._times) * self._samples * self._new_tokens

    def measure(self, way: LoadWay, ask: AskBehind) -> None:
        """Every length, with prefixes that were put out of HBM before; once, also behind the same prefix in HBM."""
        for length, times in self._times.items():
            for sample in range(self._samples):
                seed = sample % 2
                others = (1 - seed,) if length == self._longest else (0, 1)
                for other in others:
                    ask(self._longest, other, 0, 0)
                found = ask(length, seed, self._new_tokens, next(self._seeds))
                if self._came_from("dram", found, length):
                    times.by_way[way].append(found.ttft_s)
                if way is LoadWay.WHOLE:
                    continue
                again = ask(length, seed, self._new_tokens, next(self._seeds))
                if self._came_from("hbm", again, length):
                    times.hbm.append(again.ttft_s)

    def _came_from(self, tier: str, answer: Answer, length: int) -> bool:
        return answer.cached_tokens == length and answer.cached_by_tier.get(tier, 0) >= _MOSTLY * length

    def rows(self) -> Iterator[BehindRow]:
        """One a length that was asked so far."""
        for length, times in self._times.items():
            grouped, whole = (times.by_way[way] for way in LoadWay)
            if not (grouped or whole):
                continue
            both = grouped and whole
            yield BehindRow(
                prefix_tokens=length,
                new_tokens=self._new_tokens,
                grouped_s=median(grouped) if grouped else None,
                whole_s=median(whole) if whole else None,
                hbm_s=median(times.hbm) if times.hbm else None,
                grouped_over_whole=median(grouped) / median(whole) if both else None,
                load_bytes=int(length * self._token_bytes),
                samples={"grouped": len(grouped), "whole": len(whole), "hbm": len(times.hbm)},
            )
