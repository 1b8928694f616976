"""What the documents say is what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import default_socket
from kvstore.daemon.counters import Counters
from kvstore.settings import resolve
from tests.support.daemon import small_config, started

ROOT = Path(__file__).resolve().parent.parent


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", text, re.MULTILINE))
    settings = {item.key: item for item in resolve(flags={}, environ={}, uid=0).settings}
    assert list(documented) == list(settings)
    for key, shown in documented.items():
        text = settings[key].text
        if key == "socket":
            continue
        assert shown == (f"`{text}`" if text else "none" if key == "nvme" else "not set"), key


def test_the_example_of_the_configuration_page_is_valid() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert example
    config = resolve(flags={}, environ={}, uid=0, file=example[1]).config
    assert len(config.serve.nvme) == 2
    assert config.worker.model == "/models/Llama-3.2-1B-Instruct"


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """It used names that nothing in it defined."""
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    socket = Path(default_socket(environ, os.getuid()))
    socket.parent.mkdir(mode=0o700)
    with started(small_config(tmp_path, socket=str(socket))):
        done = subprocess.run(
            [sys.executable, "-c", example[1]],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.stdout, done.stderr, done.returncode) == ("16 pages of 4,194,304 bytes\n", "", 0)


def test_the_makefile_has_the_targets_that_the_documents_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / ".ci/run"):
        named = set(re.findall(r"`make ([a-z-]+)", document.read_text())) | set(
            re.findall(r"\" make ([a-z-]+)", document.read_text())
        )
        assert named <= targets, f"{document.name} names {sorted(named - targets)}"


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "docs/failures.md"])
def test_each_fault_that_a_document_names_has_its_test(document: str) -> None:
    """A table of tests that nobody compared with the tests named some that had long been renamed."""
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", (ROOT / document).read_text())
    assert len(named) > 20
    for place, test in named:
        assert f"def {test}(" in (ROOT / "tests" / place).read_text(), f"{place} has no {test}"


def test_the_page_of_failures_names_counters_that_there_are() -> None:
    text = (ROOT / "docs/failures.md").read_text()
    told = set(re.findall(r"`(nvme_[a-z_]+|mover_restarts)`", text)) - {"nvme_path"}
    assert told
    for name in told:
        assert f"{name}_total" in Counters().values(), name
