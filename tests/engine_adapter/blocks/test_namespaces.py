"""The same tokens under anything that changes the KV never hit each other; under all the same they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine_adapter.copying.copier import TwinCopier
from kvstore.client import DeviceSpec, connect
from kvstore.identity import OPTIONAL_PARTS, REQUIRED_PARTS
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import Driver
from tests.support.worker import BLOCK_TOKENS, PARTS, geometry

B = BLOCK_TOKENS
BLOCKS = 6
TOKENS = list(range(1, BLOCKS * B + 2))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Has the prompt in HBM, in DRAM and on disk, under PARTS."""
    folder: Path = tmp_path_factory.mktemp("kv")
    with started(small_config(folder, nvme_bytes=128 * MIB)) as service:
        assert cached(service, PARTS) == {}
        wait_for("the blocks on disk", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        yield service


def cached(service: Service, parts: Mapping[str, bytes]) -> dict[str, int]:
    """Cached tokens by tier of the prompt, for a new engine that states these parts; it leaves the prompt cached."""
    shape = geometry()
    device = DeviceSpec(hbm_bytes=256 * shape.slot_bytes)
    with connect(service.socket, timeout_s=30.0) as client, client.attach("one", shape, device) as session:
        copier = TwinCopier()
        try:
            engine = Driver(client, session, copier, parts=parts)
            admission = engine.run("r", TOKENS)
            engine.settle()
            return dict(admission.cached_by_tier)
        finally:
            copier.close(10.0)


CHANGED = {tag: {**PARTS, tag: b"other"} for tag in (*REQUIRED_PARTS, *OPTIONAL_PARTS)}
CHANGED |= {
    "adapter, none": {**PARTS, "adapter": b""},
    "salt, none": {**PARTS, "salt": b""},
    "dtype, longer": {**PARTS, "dtype": PARTS["dtype"] + b"0"},
    "two parts swapped": {**PARTS, "adapter": b"x", "salt": b"y"},
    "two parts": {**PARTS, "adapter": b"y", "salt": b"x"},
    "one byte moved": {
        **PARTS,
        "model": PARTS["model"][:-1],
        "weights": PARTS["model"][-1:] + PARTS["weights"],
    },
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_model_dtype_lora_or_salt_hits_nothing(service: Service, change: str) -> None:
    """Prompts under another LoRA, dtype or tenant were served the KV of the first that had asked for those tokens."""
    assert cached(service, CHANGED[change]) == {}, "it was served what something else had computed"
    assert cached(service, CHANGED[change]) == {"hbm": BLOCKS * B}, "and finds its own again"


def test_equal_parts_hit_in_every_tier(service: Service) -> None:
    assert cached(service, dict(reversed(PARTS.items()))) == {"hbm": BLOCKS * B}
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert cached(service, PARTS) == {"dram": BLOCKS * B}


def test_after_a_restart_nothing_is_taken_for_something_else(tmp_path: Path) -> None:
    """Blocks found on disk again belong to the namespace that stored them, and to no other."""
    config = small_config(tmp_path, nvme_bytes=128 * MIB)
    with started(config) as first:
        assert cached(first, PARTS) == {}
    with started(config) as second:
        assert cached(second, CHANGED["salt"]) == {}
        assert cached(second, PARTS) == {"nvme": BLOCKS * B}
