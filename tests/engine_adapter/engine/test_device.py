"""Which device an engine runs on, where there is a GPU and where there is none."""

from collections.abc import Callable

import pytest

from engine_adapter.engine import device
from engine_adapter.engine.device import compute_dtype, device_index, device_name, resolve_device
from kvstore.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the driver show so many, with all packages there."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(device, "_is_installed", lambda _: True)
        monkeypatch.setattr(device, "_torch_has_cuda", lambda: True)
        monkeypatch.setattr(device, "cuda_devices", lambda: count)

    return pretend


def test_auto_is_the_first_gpu_or_the_cpu(gpus: Callable[[int], None]) -> None:
    gpus(2)
    assert resolve_device("auto") == "cuda:0"
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match=r"cuda:2 cannot be used: the driver shows 2 CUDA"):
        resolve_device("cuda:2")
    gpus(0)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="the driver shows no CUDA device"):
        resolve_device("cuda:0")


def test_without_the_packages_a_gpu_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_is_installed", lambda module: module != "cupy")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"cupy-cuda13x not installed \(pip install 'kvstore\[cuda\]'\)"):
        resolve_device("cuda")


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_other_names_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda or cuda:N"):
        resolve_device(wanted)


def test_what_follows_from_a_device() -> None:
    assert [compute_dtype(d) for d in ("cpu", "cuda:0")] == ["float32", "bfloat16"]
    assert [device_index(d) for d in ("cpu", "cuda", "cuda:3")] == [0, 0, 3]
    assert device_name("cpu") == ""
