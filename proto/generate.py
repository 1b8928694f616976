"""Compiles proto/ into kvstore/wire/v1/: messages, gRPC stubs and type stubs.

    python proto/generate.py

The build hook and `make proto` both run this file, with grpcio-tools==1.71.2: its code imports under protobuf
5.29, 6.33 and 7.x, while newer generators' code refuses the older runtimes. What comes out is ignored by git and
is never edited.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path("kvstore/wire/v1")
PROTOS = (Path("proto/kvstore/v1/kvstore.proto"), Path("proto/grpc/health/v1/health.proto"))

_DEFAULT_POOL = "_descriptor_pool.Default()"
_PRIVATE_POOL = "_descriptor_pool.DescriptorPool()"


def compile_protos(source: Path, out: Path) -> None:
    """Compiles PROTOS below `source` into TARGET below `out`, all or nothing."""
    well_known = resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{well_known}"]
    # The virtual folder makes the generated modules import each other as kvstore.wire.v1.
    command += [f"-I{TARGET}={source / proto.parent}" for proto in PROTOS]
    command += [f"--python_out={out}", f"--grpc_python_out={out}", f"--pyi_out={out}"]
    command += [f"{TARGET}/{proto.name}" for proto in PROTOS]
    subprocess.run(command, cwd=source, check=True)
    target = out / TARGET
    _use_private_pool(target / "health_pb2.py")
    (target / "__init__.py").write_text('"""Generated from proto/ by proto/generate.py. Do not edit."""\n')


def _use_private_pool(module: Path) -> None:
    """Keeps the health messages out of the process-wide descriptor pool.

    The grpcio-health-checking package registers the same names there; whichever came second would fail to import.
    """
    text = module.read_text()
    if text.count(_DEFAULT_POOL) != 1:
        raise SystemExit(f"{module.name}: expected {_DEFAULT_POOL} once; has the generator changed?")
    module.write_text(text.replace(_DEFAULT_POOL, _PRIVATE_POOL))


def install(fresh: Path, target: Path) -> None:
    """Puts the files of `fresh` into `target`: only what differs, so that a running build or test sees no gap."""
    target.mkdir(parents=True, exist_ok=True)
    wanted = {file.name: file.read_bytes() for file in fresh.iterdir()}
    for name, content in wanted.items():
        place = target / name
        if not place.is_file() or place.read_bytes() != content:
            partial = target / f".{name}.partial"
            partial.write_bytes(content)
            partial.replace(place)
    for place in target.iterdir():
        if place.is_file() and place.name not in wanted:
            place.unlink()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        compile_protos(ROOT, Path(scratch))
        install(Path(scratch) / TARGET, ROOT / TARGET)
    print(f"generated {TARGET}/ from {', '.join(str(proto) for proto in PROTOS)}")


if __name__ == "__main__":
    main()
