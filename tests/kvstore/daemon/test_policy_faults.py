"""Policies of other packages that fail: the log says so once, and status from then on."""

from __future__ import annotations

import pytest

from eviction.base import Chooser
from eviction.lru import LruPolicy
from kvstore.config import ServeConfig
from kvstore.daemon.owner import Owner
from kvstore.daemon.policies import policy_fields, say_policy_faults
from kvstore.layout import Tier
from tests.kvstore.store_rig import PAGE, Rig, chain


class Braggart(LruPolicy, Chooser):
    """Says of its candidates what is no number."""

    in_charge = "me"

    def hit_rates(self) -> dict[str, float]:
        return {"me": "all"}  # type: ignore[dict-item]


def test_a_policy_that_failed_is_said_once_and_stands_in_status(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(hbm=16, dram=8, nvme=0)
    owner = Owner(store=rig.store, config=ServeConfig(socket="/run/kv.sock"), boot_epoch=1)
    rankings = rig.store.hints.rankings
    rankings.rank(Tier.DRAM, "braggart", Braggart, 8 * PAGE)
    rig.write_through(rig.attach(), chain(4))
    rankings.tell(1.0)
    say_policy_faults(owner)
    assert not owner.warnings
    assert policy_fields(rankings, Tier.DRAM) == {"policy": "lru"}
    for _ in range(2):
        say_policy_faults(owner)
    assert caplog.messages == ["policy failed"]
    assert owner.counters.values()["policy_faults_total"] == 1
    (warning,) = owner.warnings.values()
    assert warning.startswith("dram_policy braggart raised in what it says of its candidates: TypeError: ")
    assert warning.endswith("dram goes by lru until the daemon starts again")
