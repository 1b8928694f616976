"""The generated code under each protobuf that engines bring: 5.29 (vLLM), 6.33 and 7.x. A stage of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]

# Runs in the small environment; {expected} is the protobuf that must be in use there.
ROUND_TRIP = """
import sys, warnings
warnings.simplefilter("error")
import google.protobuf
assert google.protobuf.__version__.startswith(sys.argv[1]), google.protobuf.__version__
from kvstore.wire.v1 import health_pb2, health_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
if sys.argv[2] == "health":
    # The package registers the same names in the default pool; neither import may break the other.
    from grpc_health.v1 import health_pb2 as other
    assert other.HealthCheckRequest(service="x").SerializeToString() == \\
        health_pb2.HealthCheckRequest(service="x").SerializeToString()
for message in kvstore_pb2.DESCRIPTOR.message_types_by_name:
    kind = getattr(kvstore_pb2, message)
    assert kind.FromString(kind().SerializeToString()) == kind()
sent = kvstore_pb2.ClientMessage(acquire=kvstore_pb2.Acquire(lease=7, hashes=bytes(range(32))))
back = kvstore_pb2.ClientMessage.FromString(sent.SerializeToString())
assert back == sent and back.acquire.hashes == bytes(range(32)) and back.WhichOneof("body") == "acquire"

from concurrent import futures
import grpc
class Health(health_pb2_grpc.HealthServicer):
    def Check(self, request, context):
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
server = grpc.server(futures.ThreadPoolExecutor(1))
health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
address = "unix:" + sys.argv[3]
server.add_insecure_port(address)
server.start()
with grpc.insecure_channel(address) as channel:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    kvstore_pb2_grpc.KvstoreStub(channel)
server.stop(0).wait()
print("ok", google.protobuf.__version__, grpc.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVSTORE_"))
    }
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that users get, built as they build it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("kvstore-*.whl")
    return built


@pytest.mark.parametrize(
    "protobuf,grpcio,health",
    [
        ("5.29.5", "1.71.2", "1.71.2"),
        ("6.33.0", version("grpcio"), None),
        ("7.36.2", version("grpcio"), None),
    ],
)
def test_generated_code_imports_and_round_trips(
    protobuf: str, grpcio: str, health: str | None, wheel: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    wanted = [f"protobuf=={protobuf}", f"grpcio=={grpcio}"] + (
        [f"grpcio-health-checking=={health}"] if health else []
    )
    run(python, "-m", "pip", "install", "-q", *wanted, cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    out = run(python, "-c", ROUND_TRIP, protobuf, "health" if health else "-", tmp_path / "s", cwd=tmp_path)
    assert out.split() == ["ok", protobuf, grpcio]


def test_the_wheel_installs_with_all_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    """The base install on its own: at most 24 packages, the command line works, and no compiler is needed."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--only-binary",
        ":all:",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    listed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path).split()
    packages = [line for line in listed if not line.startswith(("pip==", "setuptools==", "kvstore=="))]
    assert len(packages) <= 24, packages
    assert "Show the effective configuration" in run(tmp_path / "env/bin/kvstore", "--help", cwd=tmp_path)
    assert '"dram"' in run(tmp_path / "env/bin/kvstore", "config", "--json", cwd=tmp_path)
