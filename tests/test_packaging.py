"""What an installation brings along, and what an import does not."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
MOST_PACKAGES = 24


def declared() -> list[Requirement]:
    return [Requirement(text) for text in requires("kvstore") or []]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def closure(requirements: list[Requirement]) -> set[str]:
    """Names of everything that `requirements` install here, by the metadata of what is installed."""
    found: set[str] = set()
    waiting = [
        (requirement, set(requirement.extras)) for requirement in requirements if applies(requirement, set())
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        found.add(name)
        for text in distribution(name).requires or []:
            further = Requirement(text)
            if applies(further, extras):
                waiting.append((further, set(further.extras)))
    return found


def test_the_base_install_is_small_and_has_no_torch() -> None:
    packages = closure(declared())
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    assert not {
        name
        for name in packages
        if name in {"torch", "transformers"} or name.startswith(("nvidia-cu", "cupy"))
    }


@pytest.mark.parametrize("version", ["5.29.0", "5.29.6", "6.33.0", "7.36.2"])
def test_each_supported_protobuf_is_allowed(version: str) -> None:
    """Elsewhere a cache pinned a protobuf that the engine beside it could not live with."""
    protobuf = next(item for item in declared() if item.name == "protobuf" and item.marker is None)
    assert protobuf.specifier.contains(version)


def test_the_grpc_stubs_find_their_grpcio() -> None:
    """Generated stubs refuse a grpcio older than the generator that made them."""
    text = (ROOT / "kvstore/wire/v1/kvstore_pb2_grpc.py").read_text()
    needed = re.search(r"GRPC_GENERATED_VERSION = '([^']+)'", text)
    assert needed
    grpcio = next(item for item in declared() if item.name == "grpcio" and item.marker is None)
    assert grpcio.specifier == SpecifierSet(f">={needed[1]}")


def test_the_constraints_pin_what_the_package_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    by_name = {canonicalize_name(pin.name): pin for pin in pins}
    assert str(by_name["torch"].specifier) == "==2.13.0"
    optional = {
        canonicalize_name(name)
        for name in ("vllm", "cupy-cuda13x", "cuda-bindings", "flashinfer-python", "nvidia-ml-py", "kvstore")
    }
    optional.add(canonicalize_name("mooncake-transfer-engine-non-cuda"))
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name not in optional:
            (pin,) = by_name[name].specifier
            assert requirement.specifier.contains(pin.version), f"{requirement} and constraints.txt disagree"


def test_every_installed_requirement_is_pinned() -> None:
    """A fresh machine gets the versions that the tests ran with, down to what dependencies bring."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")
    }
    wanted = [
        item
        for item in declared()
        if any(f"'{extra}'" in str(item.marker).replace('"', "'") for extra in ("engine", "dev"))
    ]
    base = [item for item in declared() if item.marker is None]
    try:
        packages = closure(base + [Requirement(str(item).partition(";")[0]) for item in wanted])
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed: run make setup")
    # torch's CUDA build brings these; setuptools comes with the interpreter of some versions.
    foreign = {name for name in packages if name.startswith(("nvidia-", "cuda-", "triton"))} | {"setuptools"}
    assert not packages - pinned - foreign


@pytest.mark.parametrize("module", ["kvstore", "kvstore.errors", "kvstore.config", "kvstore.cli.main"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "grpc", "numpy", "transformers"} & set(loaded.stdout.split())


def test_the_client_and_the_daemon_run_without_torch() -> None:
    script = (
        "import sys, kvstore; kvstore.connect; import kvstore.daemon.__main__; print('torch' in sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.split() == ["False"]


def test_the_generated_code_is_what_proto_says(tmp_path: Path) -> None:
    """Elsewhere the stubs in a checkout were older than the protocol beside them. `make proto` mends it."""
    compile_protos = runpy.run_path(str(ROOT / "proto/generate.py"))["compile_protos"]
    compile_protos(ROOT, tmp_path)
    fresh = tmp_path / "kvstore/wire/v1"
    current = ROOT / "kvstore/wire/v1"
    names = sorted(file.name for file in fresh.iterdir())
    assert names == sorted(file.name for file in current.iterdir() if file.name != "__pycache__")
    different = [name for name in names if (fresh / name).read_bytes() != (current / name).read_bytes()]
    assert not different, f"run `make proto`: {different}"
