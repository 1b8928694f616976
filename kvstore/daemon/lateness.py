"""How late the loop is. Who judges others by a clock takes that off: on a machine that stood still, so did they."""

from __future__ import annotations

import asyncio
import time

__all__ = ["late_after"]


async def late_after(period_s: float, ended: asyncio.Event) -> float | None:
    """Waits that long; seconds by which it took longer. None, at once, when the event is set."""
    due_s = time.monotonic() + period_s
    try:
        await asyncio.wait_for(ended.wait(), period_s)
    except TimeoutError:
        return max(0.0, time.monotonic() - due_s)
    return None
