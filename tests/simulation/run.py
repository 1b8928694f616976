"""Runs the simulation: one seed again, or fresh seeds for as long as told.

    python -m tests.simulation.run --seed N --steps M       one history; what a failure prints
    python -m tests.simulation.run --seconds 120            fresh seeds from the clock, after a fixed set
    python -m tests.simulation.run --crashes 100000         until so many have been survived
    python -m tests.simulation.run ... --base N             the seeds from N on, in place of the clock's

A seed says everything: the sizes and odds too (`plan_of`). One line every ten seconds, one at the end; the exit
code is 1 where the store was wrong, and then the command that shows it again is printed, with the last events
before it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.plan import Plan, plan_of
from tests.simulation.scenario import Scenario
from tests.simulation.shape import Death

STEPS = 5000
FIXED = range(1, 40)
"""Seeds that are always run: three of each plan."""
_PROGRESS_S = 10.0


@dataclass
class Totals:
    """What has been run."""

    seeds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    fullest: float = 0.0
    """Of the room for slabs, the most that was taken."""

    @property
    def crashes(self) -> int:
        """Deaths of the daemon, the machine or its power, asides included; a mover's count as well."""
        return sum(self.counts[death.value] for death in Death) + self.counts["asides"]

    def line(self) -> str:
        """For people."""
        counts = self.counts
        kinds = ", ".join(f"{counts[death.value]:,} {death.value}" for death in Death)
        return (
            f"{self.crashes:,} crashes in {self.seconds:,.0f} s ({kinds}, {counts['asides']:,} aside) over "
            f"{self.seeds:,} seeds: 0 wrong bytes in {counts['served'] + counts['read']:,} blocks read, 0 lost of "
            f"{counts['owed']:,} owed after {counts['flushes']:,} flushes, {counts['clears']:,} clears, "
            f"{counts['stops']:,} orderly ends, {counts['resizes']:,} resizes, "
            f"{counts['deletes']:,} deleted slabs, at most "
            f"{self.fullest:.1%} of the room for slabs"
        )


class Faults(logging.Handler):
    """What the daemon says goes into the trace of the scenario that runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.scenario: Scenario | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if self.scenario is not None:
            text = f"log: {record.getMessage()} {getattr(record, 'fields', '')}"
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            self.scenario.machine.note(text)


def run_seed(seed: int, steps: int, totals: Totals, *, plan: Plan | None = None) -> None:
    """One history. Raises what went wrong, after printing how to see it again."""
    name, own = plan_of(seed)
    handler, logger = Faults(), logging.getLogger("kvstore")
    before = logger.handlers[:], logger.propagate, logger.level
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    began_s = time.monotonic()
    scenario = Scenario(seed, own if plan is None else plan)
    handler.scenario = scenario
    try:
        scenario.run(steps)
    except BaseException as error:
        if plan is None and not isinstance(error, KeyboardInterrupt):
            traceback.print_exc(limit=-4)
            print("\n".join(scenario.machine.trace))
            print(f"plan {name}: {type(error).__name__}: {error}")
            print(f"again: python -m tests.simulation.run --seed {seed} --steps {steps}", flush=True)
        raise
    finally:
        scenario.close()
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])
        counts = scenario.machine.counts
        fullest = counts.pop("most_bytes", 0) / scenario.machine.shape.room_of(scenario.most_slabs)
        totals.counts.update(counts)
        totals.fullest = max(totals.fullest, fullest)
        totals.seeds += 1
        totals.seconds += time.monotonic() - began_s


def _seeds(base: int, fixed: bool) -> Iterator[int]:
    if fixed:
        yield from FIXED
    while True:
        yield base
        base += 1


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each seed")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--crashes", type=int, help="stop after so many")
    parser.add_argument("--base", type=int, help="first of the fresh seeds")
    given = parser.parse_args(arguments)
    totals = Totals()
    try:
        if given.seed is not None:
            run_seed(given.seed, given.steps, totals)
        else:
            _run_fresh(given, totals)
    except KeyboardInterrupt:
        print("stopped")
    except BaseException:  # noqa: BLE001 (the boundary: run_seed has said what it was)
        print(f"FAILED after {totals.crashes:,} crashes in {totals.seconds:,.0f} s")
        return 1
    print(totals.line())
    return 0


def _run_fresh(given: argparse.Namespace, totals: Totals) -> None:
    base = given.base if given.base is not None else int(time.time()) * 1000
    print(f"seeds {FIXED.start}-{FIXED.stop - 1}, then from {base} on, {given.steps} steps each", flush=True)
    until_s = time.monotonic() + (given.seconds if given.seconds is not None else float("inf"))
    said_s = time.monotonic()
    for seed in _seeds(base, given.base is None):
        if time.monotonic() >= until_s or (given.crashes is not None and totals.crashes >= given.crashes):
            return
        run_seed(seed, given.steps, totals)
        if time.monotonic() - said_s >= _PROGRESS_S:
            said_s = time.monotonic()
            print(
                f"  {totals.crashes:,} crashes, {totals.seeds:,} seeds, {totals.seconds:,.0f} s", flush=True
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
