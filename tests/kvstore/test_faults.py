"""Fault points: nothing where the environment names none, and exactly what it names where it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.faults import FAULT_VARIABLE, FaultRule, fault, parse_faults
from tests.support.fault_points import fault_points


def run(spec: str, passings: int) -> subprocess.CompletedProcess[str]:
    script = (
        "from kvstore.faults import fault\n"
        f"for i in range({passings}):\n    print(i, flush=True)\n    fault('a.b')\n    fault('c')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        env={FAULT_VARIABLE: spec},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_kill_is_at_the_named_passing() -> None:
    done = run("a.b:kill:3", 10)
    assert done.returncode == -9
    assert done.stdout.split() == ["0", "1", "2"]


def test_nothing_named_nothing_happens() -> None:
    assert run("", 3).returncode == 0
    assert run("other:kill", 3).returncode == 0
    fault("a.b")


def test_rules_of_several_points_and_of_one_point_stand_together() -> None:
    rules = parse_faults("x:kill; y:sleep=0.5:2;x:sleep=1:7")
    assert rules == {
        "x": (FaultRule(action="kill"), FaultRule(action="sleep", seconds=1.0, passing=7)),
        "y": (FaultRule(action="sleep", seconds=0.5, passing=2),),
    }


def test_a_rule_acts_once() -> None:
    rule = FaultRule(action="sleep", seconds=0.0, passing=2)
    acted: list[FaultRule] = []
    for _ in range(5):
        rule.passes(acted.append)
    assert acted == [rule]


@pytest.mark.parametrize(
    "text", ["x", "x:", ":kill", "x:stop", "x:kill:n", "x:sleep", "x:sleep=a", "x:kill=1"]
)
def test_a_rule_that_is_none_is_said(text: str) -> None:
    """A misspelt fault made a test pass without ever having killed anything."""
    with pytest.raises(ConfigError, match=FAULT_VARIABLE):
        parse_faults(text)


def test_the_crash_tests_read_their_points_from_the_code() -> None:
    """Two lists were kept by hand beside the code: a fault point that was added to neither was never tried."""
    points = fault_points()
    assert {"seal.commit", "acquire.held", "slots.free", "resume.freed"} <= set(points.store)
    assert {"grant.sent", "commit.lmdb", "hello.stored", "extent.stored"} <= set(points.daemon)
    assert {"move.start", "move.done", "mover.sync"} <= set(points.mover)
    assert {"copy.done", "client.applied"} <= set(points.worker)
    assert {"recover.rows", "recover.slots"} <= set(points.recovery)
