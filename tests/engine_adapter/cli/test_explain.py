"""Commands about a prompt of the bundled engine: `kvstore explain`, `pin` and `unpin`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.engine_adapter.cli.test_generate import generate
from tests.support.command import kvstore
from tests.support.daemon import small_config, started


def test_a_prompt_is_named_as_for_generate(model_folder: Path, tmp_path: Path) -> None:
    """The README's `kvstore explain --prompt-file F` did not exist: only people who hash by hand could ask."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a prompt of some length " * 8)
    common = ("--model", str(model_folder), "--prompt-file", str(prompt), "--json")
    with (
        tempfile.TemporaryDirectory(prefix="kv") as folder,
        started(small_config(Path(folder))) as service,
    ):
        given = (*common, "--socket", service.socket)
        before = json.loads(kvstore("explain", *given).stdout)
        assert (before["cached_tokens"], before["cause"] != "") == (0, True)
        done = generate(*given, "--max-tokens", "2")
        assert done.returncode == 0, done.stderr
        after = json.loads(kvstore("explain", *given).stdout)
        pinned = json.loads(kvstore("pin", *given, "--ttl", "90s", "--owner", "me").stdout)
        (stands,) = json.loads(kvstore("status", "--json", "--socket", service.socket).stdout)["pins"]
        others = json.loads(kvstore("unpin", *given, "--owner", "you").stdout)
        unpinned = json.loads(kvstore("unpin", *given, "--owner", "me").stdout)
        other_tenant = json.loads(kvstore("explain", *given, "--tenant", "alice").stdout)
    assert pinned == {"blocks": after["blocks"], "pinned_blocks": after["blocks"], "ttl_s": 90, "owner": "me"}
    assert (stands["owner"], stands["blocks"]) == ("me", after["blocks"])
    assert 0 < stands["ends_in_s"] <= 90
    assert (others["unpinned_blocks"], unpinned["unpinned_blocks"]) == (0, after["blocks"])
    assert other_tenant["cached_blocks"] == 0
    assert after["prompt_tokens"] == json.loads(done.stdout)["prompt_tokens"]
    assert after["cached_blocks"] == after["blocks"] > 0


def test_a_pin_without_an_end_is_refused() -> None:
    done = kvstore("pin", "--prompt", "x", "--ttl", "0s")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("kvstore: --ttl 0s: a pin lasts from")


@pytest.mark.parametrize(
    "arguments", [(), ("--tokens", "t.json"), ("--prompt", "x", "--namespace", "n.json")]
)
def test_explain_says_what_to_give(arguments: tuple[str, ...]) -> None:
    done = kvstore("explain", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: give --")
    assert done.stderr.count("\n") == 1
