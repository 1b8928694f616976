"""Workers on a GPU over a real service: what survives them in HBM, and what they leave unsealed."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("lmdb", reason="the service's disk index needs it, whether or not there is a disk")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_adapter.copying.copier import CopyBatch  # noqa: E402
from engine_adapter.copying.cuda_copier import CudaCopier  # noqa: E402
from tests.engine_adapter.loading.overlapped_loads import LARGE, behind_a_load, cold  # noqa: E402
from tests.engine_adapter.serving.test_launch_kills import (  # noqa: E402
    CHUNK,
    PROMPT,
    ask,
    die_after_a_launch,
    service,
    short_folder,
    worker,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def test_blocks_in_hbm_outlive_their_worker() -> None:
    """Killed with -9 and started again, it serves the prompt from the same memory, with the same answer."""
    with short_folder() as folder, service(folder) as store:
        with worker(folder, store, DEVICE) as path:
            cold = ask(path)
            assert cold.cached_tokens == 0
            warm = ask(path)
        with worker(folder, store, DEVICE) as path:
            after = ask(path)
    cached = (len(PROMPT) - 1) // 32 * 32
    assert warm.cached_by_tier == after.cached_by_tier == {"hbm": cached}
    assert after.token_ids == warm.token_ids


def test_what_a_launched_step_wrote_is_sealed_only_when_it_has_ended() -> None:
    """With one step in flight: the third is launched, the second may still run, the first has ended.

    The store may not have heard of that one either: a device's steps take less than a message.
    """
    found = die_after_a_launch(DEVICE, launch=3)
    assert found.cached_by_tier in ({}, {"hbm": (CHUNK + 8) // 32 * 32})


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_answers_over_a_load_under_way_are_those_over_a_whole_one(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else kernels of a layer read pages without its KV. In deterministic mode they are those of the cold run, too."""
    loads: list[int] = []
    submit = CudaCopier.submit

    def watched(self: CudaCopier, batch: CopyBatch) -> bool:
        loads.append(batch.groups)
        return submit(self, batch)

    monkeypatch.setattr(CudaCopier, "submit", watched)
    sizes = LARGE  # HBM comes in pieces of 2 MiB: nothing of the small ones would be put out of it
    settings = sizes.settings(DEVICE, deterministic=deterministic)
    with short_folder() as folder, service(folder, "--dram", "4GiB") as store:
        whole = behind_a_load(store, sizes, settings, name="whole", grouped=False)
        assert set(loads) == {1}
        grouped = behind_a_load(store, sizes, settings, name="grouped", grouped=True)
    assert max(loads) == grouped.groups[-1] > 1
    assert grouped.by_tier.get("dram", 0) > sizes.prefix // 4
    assert sum(grouped.by_tier.values()) == sum(whole.by_tier.values()) == sizes.prefix
    assert grouped.token_ids == whole.token_ids
    if deterministic:
        assert grouped.token_ids == cold(sizes, settings)
