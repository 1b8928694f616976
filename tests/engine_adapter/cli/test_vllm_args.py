"""The flag that `kvstore vllm-args` prints."""

from __future__ import annotations

import json
import shlex

import pytest

from engine_adapter.cli.vllm_args import transfer_config, vllm_args
from engine_adapter.external.options import ConnectorOptions, read_options
from kvstore.errors import ConfigError


def test_the_flag_is_what_a_shell_reads(capsys: pytest.CaptureFixture[str]) -> None:
    vllm_args(socket="/tmp/a b'c/kv.sock", layout="native", option=["room_blocks=64", "breaker_s=0.5"])
    flag, text = shlex.split(capsys.readouterr().out)
    assert flag == "--kv-transfer-config"
    said = json.loads(text)
    assert said["kv_connector_extra_config"] == {
        "socket": "/tmp/a b'c/kv.sock",
        "layout": "native",
        "room_blocks": 64,
        "breaker_s": 0.5,
    }
    assert (said["kv_role"], said["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert read_options(said["kv_connector_extra_config"]).room_blocks == 64


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"sockets": "x"}, "unknown option 'sockets'"),
        ({"layout": "mine"}, "layout must be"),
        ({"cache": "half"}, "cache must be"),
        ({"room_blocks": -1}, "room_blocks"),
        ({"room_blocks": True}, "must be a int"),
        ({"timeout_s": "5"}, "must be a float"),
        ({"breaker_s": float("inf")}, "breaker_s"),
        ({"breaker_s": 0}, "breaker_s must be more than 0"),
        ({"answer_patience_s": 1.0}, "unknown option"),
    ],
)
def test_what_the_connector_would_refuse_is_refused_here(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        transfer_config(options, on_failure="recompute")


def test_a_text_may_look_like_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A tenant called 42 was refused, since every value that is a number was taken for one."""
    vllm_args(socket="s", option=["tenant=42", "breaker_s=2"], as_json=True)
    said = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert said == {"tenant": "42", "breaker_s": 2.0, "socket": "s"}


@pytest.mark.parametrize(
    "arguments", [{"option": ["room_blocks=many"]}, {"on_failure": "retry"}, {"option": ["room_blocks"]}]
)
def test_flags_that_are_wrong(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        vllm_args(socket="s", **arguments)  # type: ignore[arg-type]


def test_the_module_and_class_are_there() -> None:
    """vLLM imports them by name; without vLLM only the text can be looked at."""
    from importlib.util import find_spec
    from pathlib import Path

    said = transfer_config({}, on_failure="recompute")
    spec = find_spec(str(said["kv_connector_module_path"]))
    assert spec is not None
    assert spec.origin is not None
    assert f"class {said['kv_connector']}(" in Path(spec.origin).read_text()
    assert read_options({}) == ConnectorOptions()
