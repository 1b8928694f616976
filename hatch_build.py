"""Build hook: generates kvstore/wire/v1/ and compiles kvstore/native/ before a wheel or an editable install is made."""

from __future__ import annotations

import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs proto/generate.py in the build environment, which holds the pinned grpcio-tools, and native/build.py."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        root = Path(self.root)
        subprocess.run([sys.executable, str(root / "proto" / "generate.py")], check=True)
        if self.target_name != "wheel":
            return
        problem = runpy.run_path(str(root / "kvstore" / "native" / "build.py"))["build_all"]()
        if problem is not None:
            self.app.display_warning(f"hashing and copies to disk stay in Python: {problem}")
        elif version == "standard":
            # The stable ABI: one wheel for 3.11 and every later version, on this platform alone.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"
