"""A model shared by two GPUs over a real service: HBM of both outlives their processes, and DRAM outlives the HBM."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("lmdb", reason="the service's disk index needs it, whether or not there is a disk")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from kvstore.errors import KvstoreError  # noqa: E402
from tests.engine_adapter.group.test_tensor_parallel import (  # noqa: E402
    CACHED,
    WAIT_S,
    shards_outlive_their_processes,
    worker,
)
from tests.engine_adapter.serving.test_launch_kills import service, short_folder  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda:0"


@pytest.mark.parametrize(
    "model, hbm, dram", [("llama-tiny", "32MiB", "64MiB"), ("llama-3.2-1b", "1GiB", "1GiB")]
)
def test_shards_outlive_their_processes(model: str, hbm: str, dram: str) -> None:
    with short_folder() as folder, service(folder, "--dram", dram) as store:
        shards_outlive_their_processes(store, lambda: worker(folder, store, DEVICE, model, hbm))


def test_a_killed_member_ends_the_worker_and_nothing_else() -> None:
    """A step that waits for the sums of a dead process waits in the driver: nothing but an exit ends it."""
    with short_folder() as folder, service(folder) as store:
        with worker(folder, store, DEVICE, "llama-tiny", "32MiB") as first:
            first.ask()
            with pytest.raises(KvstoreError):
                first.kill_member_in_an_answer()
            said = first.process.communicate(timeout=WAIT_S)[1]
            assert first.process.returncode == 1
            assert "has ended: the worker ends with it" in said
        with worker(folder, store, DEVICE, "llama-tiny", "32MiB") as second:
            assert second.ask().cached_by_tier == {"hbm": CACHED}


def test_members_end_with_their_worker() -> None:
    with short_folder() as folder, service(folder) as store, worker(folder, store, DEVICE) as running:
        running.ask()
        running.kill(running.process.pid)  # and waits for the members
