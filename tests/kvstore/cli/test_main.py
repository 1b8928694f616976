"""The program's frame: help without imports, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvstore.cli import main as program
from kvstore.cli.settings import load_settings


def kvstore(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "COLUMNS": "200", **environ},
    )


def test_help_lists_the_commands_and_imports_none_of_them() -> None:
    script = "import sys; from kvstore.cli.main import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Show the effective configuration" in done.stdout
    for heavy in ("torch", "grpc", "numpy", "google.protobuf", "lmdb"):
        assert f"'{heavy}'" not in done.stdout


def test_version() -> None:
    done = kvstore("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "kvstore")


def test_an_error_is_one_line_and_an_exit_code() -> None:
    done = kvstore("config", KVSTORE_DRAM="8Gix")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "kvstore: environment KVSTORE_DRAM: dram: unknown unit 'Gix' in size '8Gix': write"
    )
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_debug_shows_where() -> None:
    done = kvstore("config", KVSTORE_DRAM="8Gix", KVSTORE_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    done = kvstore("confg")
    assert done.returncode == 2
    assert "config" in done.stderr


def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "extra_command.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint(name="extra", value="extra_command:extra", group="kvstore.commands")
    monkeypatch.setattr(program, "entry_points", lambda group: [point])
    monkeypatch.delitem(sys.modules, "extra_command", raising=False)


@pytest.mark.parametrize(
    "module,advice", [("torch", "kvstore[engine]"), ("vllm", "kvstore[vllm]"), ("nonsense", "nonsense")]
)
def test_a_missing_extra_says_what_to_install(
    module: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(monkeypatch, tmp_path, f'"""Extra."""\nimport {module}\ndef extra() -> None: ...\n')
    monkeypatch.setitem(sys.modules, module, None)
    # None in sys.modules makes the import fail as if the module were not there.
    with pytest.raises(SystemExit) as stopped:
        program.main(["extra"])
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert advice in message
    assert message.count("\n") == 1


def test_help_reads_the_docstring_of_a_command_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, tmp_path, '"""Does something extra."""\nraise RuntimeError\n')
    with pytest.raises(SystemExit):
        program.main(["--help"])
    assert "Does something extra." in capsys.readouterr().out


def test_a_command_that_this_installation_lacks_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = EntryPoint(name="extra", value="no_such_package.commands:extra", group="kvstore.commands")
    monkeypatch.setattr(program, "entry_points", lambda group: [point])
    with pytest.raises(SystemExit):
        program.main(["--help"])
    assert "extra" not in capsys.readouterr().out


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, tmp_path, '"""Extra."""\ndef extra() -> None:\n    raise KeyboardInterrupt\n')
    with pytest.raises(SystemExit) as stopped:
        program.main(["extra"])
    assert stopped.value.code == 130


@pytest.mark.parametrize("where", ["command", "import"])
def test_an_interrupt_says_so(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ended every command without a word: the line for it stood where no interrupt came."""
    text = (
        "def extra() -> None:\n    raise KeyboardInterrupt\n"
        if where == "command"
        else "raise KeyboardInterrupt\n"
    )
    register(monkeypatch, tmp_path, f'"""Extra."""\n{text}')
    with pytest.raises(SystemExit) as stopped:
        program.main(["extra"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "kvstore: interrupted\n"


def test_config_as_toml_gives_itself(tmp_path: Path) -> None:
    environ = {
        "KVSTORE_NVME": "/a:100G,/b:1GiB",
        "KVSTORE_LIMITS_CALL_DEADLINE": "1234567us",
        "KVSTORE_DRAM": "67108865",
    }
    first = kvstore("config", "--toml", **environ)
    assert tomllib.loads(first.stdout)["nvme"] == ["/a:100GB", "/b:1GiB"]
    file = tmp_path / "kvstore.toml"
    file.write_text(first.stdout)
    original = json.loads(kvstore("config", "--json", **environ).stdout)
    again = json.loads(kvstore("config", "--config", str(file), "--json").stdout)
    assert {key: item["value"] for key, item in again.items()} == {
        key: item["value"] for key, item in original.items()
    }
    assert again["dram"]["source"] == str(file)


def test_config_shows_where_a_value_came_from() -> None:
    done = kvstore("config", KVSTORE_DRAM="3GiB")
    line = next(line for line in done.stdout.splitlines() if " dram " in line)
    assert "3GiB" in line
    assert "environment KVSTORE_DRAM" in line


def test_a_configuration_file_that_is_not_there() -> None:
    done = kvstore("config", "--config", "/nonexistent.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: cannot read the configuration file /nonexistent.toml: ")


def test_a_home_that_cannot_be_looked_into_has_no_configuration() -> None:
    """Under another uid with its caller's HOME every command died with a traceback of PermissionError."""
    beyond_looking = (
        "/" + "x" * 300
    )  # as root nothing is forbidden; a name that is too long fails in the same place
    done = kvstore("config", "--json", XDG_CONFIG_HOME=beyond_looking)
    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_without_a_home_is_asked_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uid without a passwd entry and without HOME, as in a container, is no error."""

    def no_home(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert load_settings().config.serve.max_sessions
