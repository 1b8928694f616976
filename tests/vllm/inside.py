"""What a test has done inside the process of a vLLM (`tests.vllm.driver`): looks at it, and faults."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.vllm.driver import Driver


def scheduling(driver: Driver) -> Any:
    """The connector's scheduling half."""
    return driver.core.scheduler.connector._half.scheduling


def attached(driver: Driver, timeout_s: float = 20.0) -> bool:
    """Whether the store is reached within a time."""
    until = time.monotonic() + timeout_s
    link = driver.core.scheduler.connector._half._link
    while time.monotonic() < until:
        if link.session is not None:
            return True
        time.sleep(0.02)
    return False


def stats(driver: Driver) -> dict[str, int]:
    """Counters of the scheduling half."""
    found = scheduling(driver).stats()
    return {name: getattr(found, name) for name in found.__slots__}
