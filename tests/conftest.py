"""What every test stands on: an environment without the machine's settings, and the same examples on each run."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Deterministic, and without hypothesis' own clock: pytest-timeout bounds each test, and the machines are noisy.
settings.register_profile(
    "kvstore", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvstore"))


# What runs in the background of a script ignores SIGINT, and so does all that it starts: a child would not stop for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No KVSTORE_* variable, no configuration file of the user's, no socket of a running daemon."""
    for name in os.environ:
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.getbasetemp() / "xdg"
    home.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
