"""What the scheduling process tells the ranks each step, and what they answer. Data alone: the engine carries it.

A job is blocks to copy one way. Its number is unique in the engine's life, and each rank ends every job that it was
told of. A plan is empty where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CopyJob", "StepPlan", "StepReport"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyJob:
    """Blocks between the engine's pages and DRAM slots; which way says where in a plan it stands. May be none."""

    number: int
    request: str
    pages: NDArray[
        np.int64
    ]  # [n, groups] the engine's block ids; 0, its null block: nothing of that group is copied
    slots: NDArray[np.uint32]  # [n] DRAM slots
    generations: NDArray[np.uint32]  # [n]
    missing: tuple[int, ...] = ()
    """Of a load: pages of the first group that the engine waits for and nothing will come into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """For one step of the engine."""

    loads: tuple[CopyJob, ...] = ()
    """DRAM → pages. When one has ended its request is named as received, whatever became of it."""
    stores: tuple[CopyJob, ...] = ()
    """Pages → DRAM, once this step has computed."""
    before_step: tuple[int, ...] = ()
    """Stores whose pages this step may overwrite: they end, or are taken back, before it computes."""
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests that have ended → stores that still read their pages. Named as sent once those have ended."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.loads or self.stores or self.before_step or self.held)


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What a rank has done since its last report; reports of several ranks add up."""

    done: dict[int, int] = field(default_factory=dict)
    """Job → ranks that have ended it."""
    failed: set[int] = field(default_factory=set)
    """Jobs that some rank did not carry out."""

    def end(self, number: int, *, failed: bool) -> None:
        """One rank has ended a job."""
        self.done[number] = self.done.get(number, 0) + 1
        if failed:
            self.failed.add(number)

    def add(self, other: StepReport) -> StepReport:
        """Both."""
        done = dict(self.done)
        for number, ranks in other.done.items():
            done[number] = done.get(number, 0) + ranks
        return StepReport(done=done, failed=self.failed | other.failed)
