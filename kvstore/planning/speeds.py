"""What prefill and the tiers have cost lately: seconds as a line through running measurements, and nothing else.

Owns the estimators of the planner. A measurement is a few features (tokens, bytes, …) and the seconds that they took;
the newest count most, each by its relative error, and one that is far off counts as twice or half of what was
expected, so that a hiccup moves little; of a change that stays the third measurement makes a fresh start. What comes
out are frozen records of coefficients, which `kvstore.planning.planner` reads. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import frexp

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import Tier

__all__ = ["PrefillSpeed", "SpeedMeter", "Speeds", "TierSpeed"]

_NEWEST = 0.1
"""What a measurement counts of the mean of those like it, once there are ten of them."""
_TRUSTED = 4
"""Measurements of a kind from which on one that is far off is taken for a hiccup."""
_FAR_OFF = 2.0
_NO_HICCUP, _CHANGED = 3, 3.0
"""So many in a row that are so many times too slow or too fast are no hiccup: what came before is forgotten."""
_FADE, _FADED = 0.98, 0.05
"""What a kind counts less with each measurement of others, and at least: what was seen once is not forgotten."""
_APART = 1.5
"""A disk is not believed to be so many times faster beside a computation than by itself."""
_BOTH_NEWEST, _BOTH_MOST, _BOTH_FADE = 0.25, 4.0, 0.97
"""What both ends took beside what was expected: weight of the newest, the most that one says, and how it is forgotten
with each request that goes another way, so that both ends are tried again after some tens of them."""
_GUESS = 2.0
"""No bytes are believed to be so many times faster than any load that was measured."""
_FIT_PART = 32
_SIMPLER = 0.002
"""A line with one cost less is taken where its mean square error, relative, is no more than that worse."""
_RIDGE = 1e-9
_ANCHOR = 0.3
"""What the assumed cost of context weighs, in measurements: little beside what was measured at length."""
_TOKENS, _CONTEXT, _BYTES = 512.0, 4096.0, float(1 << 20)  # units in which all features are about 1
_LEAST_S = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """Seconds of a step, of each token in it, and of each token for each token before it."""

    step_s: float
    token_s: float
    context_s: float
    proven_tokens: int = 1 << 30
    """The largest step that was measured: what is said of a much larger one is a guess."""

    def seconds(self, begin: int, end: int, chunk_tokens: int) -> float:
        """To compute tokens [begin, end) in chunks of at most so many."""
        if end <= begin:
            return 0.0
        tokens, steps = end - begin, -(-(end - begin) // chunk_tokens)
        context = 0.5 * (end * end - begin * begin)
        return steps * self.step_s + tokens * self.token_s + context * self.context_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """Seconds until the first byte, and of each byte."""

    start_s: float
    byte_s: float

    def seconds(self, nbytes: float) -> float:
        """To load so many bytes, those queued ahead of them among these."""
        return self.start_s + nbytes * self.byte_s if nbytes > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of a long load."""
        return 1.0 / max(self.byte_s, 1e-15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """All that is known. A tier that nothing was loaded from is not in `tiers`."""

    prefill: PrefillSpeed | None
    tiers: Mapping[Tier, TierSpeed]
    beside: TierSpeed | None = None
    """A disk that is read while the same engine computes, whose threads then wait for each other; None: never so."""

    both_factor: float = 1.0
    """How many times as long both ends have taken lately as was expected; at least 1."""

    @property
    def behind(self) -> TierSpeed | None:
        """A disk that is to be read beside a computation, as far as is known."""
        return self.beside or self.tiers.get(Tier.NVME)


@dataclass(slots=True)
class _Kind:
    """The mean of measurements that are alike to within a factor of two in every feature."""

    features: NDArray[np.float64]
    seconds: float
    count: int
    last: int  # how many measurements there were of any kind


class _Line:
    """Seconds = sum of coefficient x feature, none of them negative; least squares over the kinds of measurements.

    By kinds, so that what is measured often does not push out what was measured of another size: the last tokens behind
    a long cached prefix say nothing of a whole chunk.
    """

    __slots__ = ("_fit", "_fitted", "_kinds", "_off", "_size", "count")

    def __init__(self, features: int) -> None:
        self._size = features
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._fit: NDArray[np.float64] | None = None
        self._fitted = 0  # how many measurements _fit is of
        self._off = 0  # measurements in a row that were far off it: above 0 too slow, below too fast
        self.count = 0

    def measured(self, features: Sequence[float], seconds: float) -> None:
        """Takes one measurement. O(features)."""
        x = np.asarray(features, dtype=np.float64)
        seconds = max(float(seconds), _LEAST_S)
        self.count += 1
        key = tuple(frexp(feature)[1] for feature in features)
        if self._has_changed(x, seconds):
            self._kinds, self._fit, self._off = {key: _Kind(x, seconds, 1, self.count)}, None, 0
            return
        kind = self._kinds.get(key)
        if kind is None:
            self._kinds[key] = _Kind(x, seconds, 1, self.count)
            return
        if kind.count >= _TRUSTED:
            seconds = min(max(seconds, kind.seconds / _FAR_OFF), kind.seconds * _FAR_OFF)
        kind.count += 1
        share = max(1.0 / kind.count, _NEWEST)
        kind.features = kind.features + share * (x - kind.features)
        kind.seconds += share * (seconds - kind.seconds)
        kind.last = self.count

    def expected(self, features: Sequence[float]) -> float:
        """Seconds, by the fit; 0 where nothing was measured."""
        return float(self.fit() @ np.asarray(features, dtype=np.float64)) if self.count else 0.0

    def best(self) -> tuple[float, float]:
        """The kind of measurements that took the least for each of the first feature: how many of it, and seconds."""
        kinds = [(max(float(kind.features[0]), _LEAST_S), kind.seconds) for kind in self._kinds.values()]
        return min(kinds, key=lambda kind: kind[1] / kind[0])

    def _has_changed(self, x: NDArray[np.float64], seconds: float) -> bool:
        """Whether this and the measurements before it were all far off the line in the same direction."""
        if self._fit is None or self.count <= _TRUSTED:
            return False
        expected = max(float(self._fit @ x), _LEAST_S)
        way = (seconds > expected * _CHANGED) - (seconds < expected / _CHANGED)
        self._off = self._off + way if way and way * self._off >= 0 else way
        return abs(self._off) >= _NO_HICCUP

    def fit(self, ratio: float = 0.0) -> NDArray[np.float64]:
        """The coefficients. `ratio`: of the second to the first, where nothing that was measured says otherwise."""
        # Of many measurements one more changes little, and a fit takes as long as a hundred of them.
        if self._fit is None or self.count - self._fitted > self.count // _FIT_PART:
            self._fitted = self.count
            moments, products, total = np.zeros((self._size, self._size)), np.zeros(self._size), 0.0
            for kind in self._kinds.values():
                weight = min(kind.count, 1.0 / _NEWEST) * max(_FADE ** (self.count - kind.last), _FADED)
                x = kind.features / kind.seconds  # errors count relative to what was measured
                moments += weight * np.outer(x, x)
                products += weight * x
                total += weight
            if ratio:
                row = np.array([-ratio, 1.0, 0.0]) / max(1.0, ratio)
                moments += _ANCHOR * float(moments[0, 0]) * np.outer(row, row)
            self._fit = _least_squares(moments, products, _SIMPLER * total)
        return self._fit


def _least_squares(
    moments: NDArray[np.float64], products: NDArray[np.float64], worth: float
) -> NDArray[np.float64]:
    """The best coefficients of which none is negative, by trying which of them are zero: there are few.

    One with more of them, or with later ones, must be better by `worth`: measurements of one size are put down to bytes
    and tokens, not to a start.
    """
    features = len(products)
    best, best_error = np.zeros(features), np.inf
    for size in range(1, features + 1):
        for chosen in combinations(range(features), size):
            at = list(chosen)
            part = moments[np.ix_(at, at)]
            solved = np.linalg.solve(part + _RIDGE * max(np.trace(part), 1e-30) * np.eye(size), products[at])
            if (solved < 0).any():
                continue
            error = float(solved @ part @ solved - 2.0 * products[at] @ solved)
            if error < best_error - worth:
                best, best_error = np.zeros(features), error
                best[at] = solved
    return best


class SpeedMeter:
    """The estimators of one engine."""

    __slots__ = ("_attention", "_beside", "_both", "_prefill", "_proven", "_tiers")

    def __init__(self, *, attention: float = 0.0) -> None:
        """`attention`: what a token costs more for each token before it, as a share of what it costs with none.

        From the model's shape (`engine_adapter`); it stands until prompts of many lengths were measured. 0: nothing is
        known, and a long prompt is taken for cheaper than it is until one was computed.
        """
        self._attention = attention
        self._prefill = _Line(3)
        self._proven = 0
        self._tiers: dict[Tier, _Line] = {}
        self._beside = _Line(2)
        self._both = 1.0

    def computed(self, tokens: int, context: float, seconds: float) -> None:
        """A step computed so many tokens of prompts, `context`: the sum over them of the tokens before each."""
        if tokens > 0:
            self._proven = max(tokens, self._proven)
            self._prefill.measured((tokens / _TOKENS, context / (_TOKENS * _CONTEXT), 1.0), seconds)

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """A load of so many bytes took so long, from when it was wanted; what was queued ahead is among the bytes.

        A disk beside a computation is not faster: one that was taken for much faster has become slow there, too.
        """
        if nbytes > 0:
            features = (nbytes / _BYTES, 1.0)
            self._tiers.setdefault(tier, _Line(2)).measured(features, seconds)
            if tier is Tier.NVME and 0.0 < self._beside.expected(features) < seconds / _APART:
                self._beside.measured(features, seconds)

    def loaded_beside(self, nbytes: int, seconds: float) -> None:
        """As `loaded`, from a disk while the engine computed."""
        if nbytes > 0:
            self._beside.measured((nbytes / _BYTES, 1.0), seconds)

    def not_loaded_beside(self, nbytes: int, seconds: float) -> None:
        """A load as in `loaded_beside` was given up after so long, or its use is over.

        Says something where it should have come by then. Were it left out, only loads that came soon would count, and a
        disk from which few come in time would be taken for a fast one.
        """
        features = (nbytes / _BYTES, 1.0)
        if nbytes > 0 and seconds > self._beside.expected(features):
            self._beside.measured(features, seconds)

    def both_took(self, expected_s: float, seconds: float) -> None:
        """Both ends of a request that was alone have met after so long.

        Whatever makes them slower than loads and steps by themselves (threads and processes that lack a core, pages
        that come late) counts here, without a model of it.
        """
        if expected_s > 0:
            found = min(max(seconds / expected_s, 1.0), _BOTH_MOST)
            self._both += _BOTH_NEWEST * (found - self._both)

    def other_way(self) -> None:
        """A request went another way than both ends."""
        self._both = 1.0 + _BOTH_FADE * (self._both - 1.0)

    def speeds(self) -> Speeds:
        """What is known now. A disk that was only read beside computations is not faster without: so it counts."""
        beside = _disk(self._beside) if self._beside.count else None
        tiers = {tier: _disk(it) if tier is Tier.NVME else _tier(it) for tier, it in self._tiers.items()}
        if beside is not None:
            tiers.setdefault(Tier.NVME, beside)
        return Speeds(prefill=self._prefill_speed(), tiers=tiers, beside=beside, both_factor=self._both)

    def _prefill_speed(self) -> PrefillSpeed | None:
        if not self._prefill.count:
            return None
        token_s, context_s, step_s = self._prefill.fit(self._attention * _CONTEXT).tolist()
        return PrefillSpeed(
            step_s=step_s,
            token_s=token_s / _TOKENS,
            context_s=context_s / (_TOKENS * _CONTEXT),
            proven_tokens=self._proven,
        )


def _tier(line: _Line) -> TierSpeed:
    byte_s, start_s = line.fit().tolist()
    return TierSpeed(start_s=start_s, byte_s=byte_s / _BYTES)


def _disk(line: _Line) -> TierSpeed:
    """A line through loads of about one size may put all down to their start, and then larger ones are a guess.

    So it is turned about the best rate that was measured, until no bytes are much faster than that.
    """
    byte_s, start_s = line.fit().tolist()
    size, seconds = line.best()
    steeper = max(0.0, seconds / size / _GUESS - byte_s)
    return TierSpeed(start_s=max(0.0, start_s - steeper * size), byte_s=(byte_s + steeper) / _BYTES)
