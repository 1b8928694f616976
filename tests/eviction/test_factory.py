"""Policies of other packages: found by their entry points, and refused in a line where they are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from eviction.factory import OURS, names, policy_factory
from kvstore.errors import InvalidArgument

MODULE = """
from eviction.lru import LruPolicy

NUMBER = 5

class Mine(LruPolicy):
    pass

class Unlicensed:
    def __init__(self, **sizes):
        raise ValueError("no\\nlicence")

class Half:
    def __init__(self, *, rows, capacity_blocks):
        self.use = self.victims = self.remove = print
"""


def package(folder: Path, name: str, points: dict[str, str], module: str = MODULE) -> None:
    """A package as pip would have installed it, with these entry points."""
    (folder / f"{name}_module.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {value}" for point, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvstore.eviction]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_adds_one(site: Path) -> None:
    package(site, "good", {"mine": "good_module:Mine"})
    policy = policy_factory("mine")(rows=8, capacity_blocks=4)
    assert type(policy).__module__ == "good_module"
    assert set(names()) == {*OURS, "mine"}


@pytest.mark.parametrize(
    "value, said",
    [
        ("bad_nowhere:Mine", "cannot be loaded: ModuleNotFoundError: No module named 'bad_nowhere'"),
        ("bad_module:Missing", "cannot be loaded: AttributeError"),
        ("bad_module:NUMBER", "is no PolicyFactory: it cannot be called"),
        ("bad_module:Unlicensed", "cannot be made: ValueError: no licence"),
        ("bad_module:Half", "is no Policy: it has no ended, expect"),
        ("not an entry point", "cannot be loaded"),
    ],
)
def test_what_is_no_policy_is_said_in_a_line(site: Path, value: str, said: str) -> None:
    """The daemon died of it, at its start or when the first block came, and was started again for ever."""
    package(site, "bad", {"worse": value})
    with pytest.raises(InvalidArgument) as error:
        policy_factory("worse")
    assert str(error.value).startswith("the eviction policy 'worse' (")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_package_that_fails_when_it_is_imported(site: Path) -> None:
    package(site, "broken", {"broken": "broken_module:Mine"}, "raise OSError('no device')")
    with pytest.raises(
        InvalidArgument, match=r"broken_module:Mine of broken.*cannot be loaded: OSError: no device"
    ):
        policy_factory("broken")


@pytest.mark.parametrize("name", ["lru", "auto"])
def test_no_package_takes_the_place_of_a_bundled_policy(site: Path, name: str) -> None:
    package(site, "thief", {name: "thief_module:Mine"})
    with pytest.raises(
        InvalidArgument, match=f"'{name}' is kvstore's own, and thief_module:Mine of thief takes"
    ):
        policy_factory(name)


def test_two_packages_with_one_name(site: Path) -> None:
    package(site, "one", {"mine": "one_module:Mine"})
    package(site, "two", {"mine": "two_module:Mine"})
    with pytest.raises(InvalidArgument, match="remove all but one"):
        policy_factory("mine")


def test_what_is_tried_is_a_policy(site: Path) -> None:
    """All bundled policies have the hooks that others are tried for."""
    package(site, "again", {f"again-{name}": value for name, value in OURS.items()})
    for name in OURS:
        assert len(policy_factory(f"again-{name}")(rows=8, capacity_blocks=4)) == 0
