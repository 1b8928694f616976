"""Build hook: generates kvstore/wire/v1/ before a wheel, a source distribution or an editable install is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateWire(BuildHookInterface):  # type: ignore[type-arg]
    """Runs proto/generate.py in the build environment, which holds the pinned grpcio-tools."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        subprocess.run([sys.executable, str(Path(self.root) / "proto" / "generate.py")], check=True)
