"""Policies alone on a trace: the rates that they have, and what the command prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from bench.simulate.command import simulate
from bench.simulate.compare import compare
from bench.simulate.readers.open import open_trace
from bench.simulate.replay import replay
from bench.simulate.stack import lru_curve
from eviction.base import MayGo, Rows
from eviction.factory import policy_factory
from eviction.lru import LruPolicy
from kvstore.errors import ConfigError, InvalidArgument, MissingExtra
from tests.bench.simulate.traces import DATA, random_chains, trace_of, whole


def silent(_text: str) -> None:
    pass


def run(*arguments: str) -> dict[str, object]:
    app = Typer()
    app.command()(simulate)
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


class Twice(LruPolicy):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        found = super().victims(count, now_s, may_go)
        return np.repeat(found[:1], len(found))


class NotCached(LruPolicy):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        super().victims(count, now_s, may_go)
        return np.arange(count, dtype=np.uint32)


class TooFew(LruPolicy):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return super().victims(count - 1, now_s, may_go)


class Raises(LruPolicy):
    def expect(self, _waiting: Sequence[Rows]) -> None:
        raise RuntimeError("no\nidea")


@pytest.mark.parametrize(
    "policy, said",
    [
        (Twice, "named victims that are none: a block twice, or one that is not cached"),
        (NotCached, "named victims that are none"),
        (TooFew, "victims where"),
        (Raises, "raised in a replay: RuntimeError: no idea ("),
    ],
)
def test_a_policy_that_breaks_its_contract_ends_the_replay(policy: type[LruPolicy], said: str) -> None:
    """One that named a block over and over left more in its cache than fits, and beat the optimum."""
    trace = trace_of(random_chains(200, 1))
    with pytest.raises(InvalidArgument) as error:
        replay(trace, policy(rows=trace.unique_blocks, capacity_blocks=40), 40, 2)
    assert said in error.value.message
    assert policy.__name__ in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize("capacity", [3, 17, 90])
def test_lru_behind_the_contract_is_lru_by_distances(capacity: int) -> None:
    trace = trace_of(random_chains(500, 1))
    policy = policy_factory("lru")(rows=trace.unique_blocks, capacity_blocks=capacity)
    assert replay(trace, policy, capacity) == pytest.approx(lru_curve(trace).hit_rate(capacity))


def test_knowing_the_next_requests_keeps_what_they_want() -> None:
    chains = [[0, 1], [2, 3], [4, 5], [0, 1]]
    hit_rates = []
    for look_ahead in (0, 3):
        policy = policy_factory("lru")(rows=6, capacity_blocks=2)
        hit_rates.append(replay(trace_of(chains), policy, 2, look_ahead))
    assert hit_rates == [0.0, 0.25]


def test_a_comparison_has_its_bounds() -> None:
    trace = trace_of(random_chains(400, 4))
    found = compare(trace, ["lru", "fifo"], [1.0, 10.0], 0, silent)
    assert [(row.policy, row.capacity_pct) for row in found.rows] == [
        ("lru", 1.0), ("lru", 10.0), ("fifo", 1.0), ("fifo", 10.0),
    ]  # fmt: skip
    for row in found.rows[:2]:
        assert row.gap_closed == pytest.approx(0.0, abs=1e-9)
    assert all(row.hit_rate <= found.infinite for row in found.rows)


def test_a_policy_that_is_not_there_is_named_before_anything_runs() -> None:
    with pytest.raises(InvalidArgument, match="none-such"):
        compare(trace_of([[1]]), ["none-such"], [1.0], 0, silent)


def test_what_json_holds() -> None:
    """The form that scripts judge by: nothing in a row but these, bounds keyed by the capacity in percent."""
    path = str(DATA / "claude_code.jsonl")
    found = run(path, "--policy", "lru", "--capacity", "0.5%,5%,20", "--users", "2", "--look-ahead", "2")
    assert {"rows", "belady", "infinite"} <= set(found)
    assert [sorted(row) for row in found["rows"]] == [
        ["capacity_blocks", "capacity_pct", "gap_closed", "hit_rate", "policy"]
    ] * 3
    assert list(found["belady"]) == ["0.5", "5", "20"]
    assert isinstance(found["infinite"], float)
    assert all(speed["accesses_per_s"] > 0 for speed in found["speed"])


def test_a_trace_without_sessions_needs_no_users() -> None:
    found = run(str(DATA / "mooncake.jsonl"), "--policy", "lru,lru", "--capacity", "10%", "--users", "64")
    assert len(found["rows"]) == 1


def test_halves_of_a_trace() -> None:
    path = str(DATA / "mooncake.jsonl")
    parts = [run(path, "--policy", "lru", "--split", f"half:{half}")["trace"]["requests"] for half in (0, 1)]
    assert sum(parts) == len(open_trace(DATA / "mooncake.jsonl"))


@pytest.mark.parametrize(
    "option",
    [
        ("--capacity", "0%"),
        ("--capacity", "x"),
        ("--policy", "lru,,"),
        ("--split", "third:0"),
        ("--block-tokens", "0"),
    ],
)
def test_wrong_options(option: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=option[0]):
        run(str(DATA / "mooncake.jsonl"), *option)


def test_curves_are_drawn(tmp_path: Path) -> None:
    run(
        str(DATA / "mooncake.jsonl"), "--policy", "lru", "--capacity", "5%,20%", "--plot", str(tmp_path / "a")
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_plot_that_cannot_be_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said after the replays, it cost all of them."""
    path = str(DATA / "mooncake.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _name: None)
        with pytest.raises(MissingExtra, match="kvstore\\[sim\\]"):
            run(path, "--plot", str(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: name)
        with pytest.raises(ConfigError, match="not a folder"):
            run(path, "--plot", str(tmp_path / "none" / "a"))


def test_speed_on_a_whole_trace() -> None:
    """At least 6,000 requests a second of one core; measured: 35,000."""
    trace = open_trace(whole("mooncake_conversation"))
    found = compare(trace, ["lru"], [5.0], 0, silent)
    assert found.rows[0].hit_rate == pytest.approx(0.1349, abs=0.005)
    assert len(trace) / found.rows[0].seconds > 6000
