"""How soon blocks of each class are used again: hazards by age, learned online, and what a block is worth by them.

A *life* runs from one use of a block to its next, whether or not the block was cached meanwhile: eviction censors
nothing. For each class and age bucket two counts are kept of the lives that reached the bucket: those that ended in it,
and those that outlived it. A life is counted in a bucket when it could have outlived it, not before: otherwise the
young ends of lives that began lately would be counted, and their survivors not yet.

The worth of a block of age a is the best that it can still do in the cache (the index of Gittins, "Bandit processes and
dynamic allocation indices", 1979; for caches of unequal reuse: Beckmann, Chen, Cidon, "LHD", NSDI 2018):

    max over t of  P(used again before a + t | not before a) / E[time until used again or a + t]

hits per second of a slot, were it let go at the best moment. Evicting the least worth first is what a fixed population
of known hazards asks for; a class that is used again late, but surely, does not lose to one that is young.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BUCKETS", "ReuseAges", "age_buckets", "age_cuts"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_FIRST_AGE_S = 1.0
_BUCKETS_AN_OCTAVE = 2
BUCKETS = 40
"""The last begins after 2^19 s, six days: what is not used by then is never used."""
_EDGES_S: F64 = np.concatenate(([0.0], _FIRST_AGE_S * 2.0 ** (np.arange(BUCKETS) / _BUCKETS_AN_OCTAVE)))
_WIDTHS_S: F64 = np.diff(_EDGES_S)
_INNER_EDGES_S = _EDGES_S[1:BUCKETS].copy()
_ALIVE = np.inf
_FORGOTTEN = -np.inf
"""End of a life that nobody would notice any more: it counts in no further bucket."""
_SHRINK_LIVES = 200.0
"""A class with fewer lives than this in a bucket is mostly believed to be like all others: blocks of a prompt live and
end together, so these are only the lives of some prompts."""
_LEAST_HAZARD = 1e-6
_HALF_LIFE_LIVES = 1 << 18
"""Lives after which old counts weigh half: a change of load is learned within a few hundred thousand blocks."""


def age_buckets(ages_s: F64) -> I64:
    """[n] the bucket of each age."""
    found: I64 = _INNER_EDGES_S.searchsorted(ages_s, side="right")
    return found


def age_cuts(began_s: F64, now_s: float) -> I64:
    """[BUCKETS + 1] of ascending times, how many are at least as old as each bucket's begin; none is older than all."""
    cuts: I64 = np.searchsorted(began_s, now_s - _EDGES_S, side="right")
    cuts[0], cuts[BUCKETS] = len(began_s), 0
    return cuts


class ReuseAges:
    """Counts of all classes, and their worth by age.

    A class is one value of each of two factors, `classes` many: first * classes[1] + second.
    """

    __slots__ = (
        "_began",
        "_class",
        "_ended",
        "_ended_in",
        "_factors",
        "_lives_at_refresh",
        "_mask",
        "_outlived",
        "_reached",
        "_seen",
        "lives",
        "worth",
    )

    def __init__(self, classes: tuple[int, int], max_lives: int) -> None:
        """At least the last `max_lives` are followed."""
        self._factors = classes
        places = (
            1 << max(max_lives - 1, 1).bit_length()
        )  # of a ring, by serial number; untouched it takes no memory
        self._mask = places - 1
        self._began = np.empty(places, dtype=np.float64)
        self._ended = np.empty(places, dtype=np.float64)
        self._class = np.empty(places, dtype=np.uint16)
        self.lives = 0
        """Begun so far; the serial number of the next."""
        self._lives_at_refresh = 0
        self._seen = np.zeros(classes[0] * classes[1], dtype=np.bool_)  # classes that lives were begun of
        self._reached = np.zeros(
            BUCKETS, dtype=np.int64
        )  # serial number of the first life not counted in a bucket
        self._ended_in = np.zeros((classes[0] * classes[1], BUCKETS))
        self._outlived = np.zeros((classes[0] * classes[1], BUCKETS))
        self.worth = np.full(
            (classes[0] * classes[1], BUCKETS), 1.0
        )  # [class, bucket] hits a second of a slot

    def begin(self, classes: I64, now_s: float) -> int:
        """So many lives begin; returns the serial number of the first. The oldest are forgotten for them."""
        first = self.lives
        self.lives += len(classes)
        at = first & self._mask
        stop = at + len(classes)
        where: slice | I64 = slice(at, stop)
        if stop > len(self._began):
            where = np.arange(first, self.lives) & self._mask
        self._began[where] = now_s
        self._ended[where] = _ALIVE
        self._class[where] = classes
        self._seen[classes] = True
        return first

    def end(self, lives: I64, now_s: float) -> F64:
        """[n] ages of lives that end now; of those forgotten, infinite."""
        at = lives & self._mask
        oldest = self._oldest()
        if not len(lives) or int(lives.min()) >= oldest:
            self._ended[at] = now_s
            found: F64 = now_s - self._began[at]
            return found
        known = lives >= oldest
        ages = np.full(len(lives), _ALIVE)
        self._ended[at[known]] = now_s
        ages[known] = now_s - self._began[at[known]]
        return ages

    def forget(self, lives: I64) -> None:
        """Nobody will say when these end: what they outlived counts, what they would have does not. O(n)."""
        self._ended[lives[lives >= self._oldest()] & self._mask] = _FORGOTTEN

    def classes(self, lives: I64) -> I64:
        """[n] class of each life; of those forgotten, 0."""
        return np.where(lives >= self._oldest(), self._class[lives & self._mask], 0).astype(np.int64)

    def relabel(self, lives: I64, classes: I64) -> None:
        """These are of other classes, in what is still to be counted of them. O(n)."""
        known = lives >= self._oldest()
        self._class[lives[known] & self._mask] = classes[known]
        self._seen[classes] = True

    def worth_at(self, classes: I64, ages_s: F64) -> F64:
        """[n] hits a second of a slot that holds a block of such a class at such an age."""
        found: F64 = self.worth[classes, age_buckets(ages_s)]
        return found

    def refresh(self, now_s: float) -> None:
        """Counts what could be counted since the last time, and makes the worth anew. O(new lives + classes)."""
        fade = 0.5 ** ((self.lives - self._lives_at_refresh) / _HALF_LIFE_LIVES)
        self._lives_at_refresh = self.lives
        self._ended_in *= fade
        self._outlived *= fade
        for bucket in range(BUCKETS - 1):
            low, born_by_s = max(int(self._reached[bucket]), self._oldest()), now_s - _EDGES_S[bucket + 1]
            if low == self.lives or self._began[low & self._mask] > born_by_s:
                continue
            high = low
            for part in self._parts(low, self.lives):
                high += int(np.searchsorted(self._began[part], born_by_s, side="right"))
            for part in self._parts(low, high):
                self._count_lives(bucket, part)
            self._reached[bucket] = high
        seen = np.flatnonzero(self._seen)
        hazards, of_all = self._hazards()
        worth = _worth(np.concatenate((of_all[None, :], hazards[seen])))
        self.worth[:] = worth[0]  # classes that no life was of are worth what all are
        self.worth[seen] = worth[1:]

    def _oldest(self) -> int:
        """Serial number of the first life that is followed."""
        return max(self.lives - len(self._began), 0)

    def _parts(self, low: int, high: int) -> list[slice]:
        """Where these lives are in the ring."""
        at, places = low & self._mask, len(self._began)
        stop = at + high - low
        return [slice(at, stop)] if stop <= places else [slice(at, places), slice(0, stop - places)]

    def _count_lives(self, bucket: int, part: slice) -> None:
        ages = self._ended[part] - self._began[part]
        classes, n = self._class[part], len(self._ended_in)
        outlived = ages >= _EDGES_S[bucket + 1]
        self._outlived[:, bucket] += np.bincount(classes[outlived], minlength=n)
        ended = ~outlived & (ages >= _EDGES_S[bucket])
        self._ended_in[:, bucket] += np.bincount(classes[ended], minlength=n)

    def _hazards(self) -> tuple[F64, F64]:
        """[class, bucket] P(a life ends in the bucket | it reached it): the mean of the two factors' log odds.

        And [bucket] the same of all lives.
        """
        ended = self._ended_in.reshape(*self._factors, BUCKETS)
        outlived = self._outlived.reshape(*self._factors, BUCKETS)
        of_all, reached = ended.sum(axis=(0, 1)), outlived.sum(axis=(0, 1))
        prior = of_all / np.maximum(of_all + reached, 1e-9)
        odds = [_log_odds(ended.sum(axis=axis), outlived.sum(axis=axis), prior) for axis in (1, 0)]
        mean = (odds[0][:, None, :] + odds[1][None, :, :]) / 2.0
        hazards: F64 = (1.0 / (1.0 + np.exp(-mean))).reshape(-1, BUCKETS)
        hazards[:, prior == 0.0] = 0.0
        hazards[:, -1] = prior[-1] = 0.0
        return hazards, prior


def _log_odds(ended: F64, outlived: F64, prior: F64) -> F64:
    """[class, bucket] of a hazard, believed to be `prior` where there are few lives."""
    hazard = (ended + _SHRINK_LIVES * prior) / (ended + outlived + _SHRINK_LIVES)
    hazard = np.clip(hazard, _LEAST_HAZARD, 1.0 - _LEAST_HAZARD)
    found: F64 = np.log(hazard / (1.0 - hazard))
    return found


def _worth(hazards: F64) -> F64:
    """[class, bucket] the index for blocks in the middle of each bucket."""
    worth = np.zeros_like(hazards)
    middle = 1.0 - np.sqrt(1.0 - hazards)  # half of a bucket lies behind them
    alive = np.cumprod(1.0 - hazards, axis=1)
    # Sums over whole buckets from each bucket on, as differences: hits and seconds up to the end of bucket k.
    before = np.concatenate((np.ones((len(hazards), 1)), alive[:, :-1]), axis=1)
    hits = np.cumsum(before * hazards, axis=1)
    seconds = np.cumsum(before * _WIDTHS_S * (1.0 - hazards / 2.0), axis=1)
    # From the middle of bucket b to the end of bucket k: the sums' difference, for those alive at the end of b, and the
    # rest of b itself. All divided by P(alive at b's end), so that only the sums depend on k.
    left = np.maximum(1.0 - middle, 1e-12) / np.maximum(alive, 1e-12)
    more_hits = middle / left - hits
    more_s = _WIDTHS_S / 2.0 * (1.0 - middle / 2.0) / left - seconds
    for bucket in range(hazards.shape[1] - 1):
        rates = hits[:, bucket:-1] + more_hits[:, bucket, None]
        rates /= seconds[:, bucket:-1] + more_s[:, bucket, None]
        worth[:, bucket] = rates.max(axis=1)
    return worth
