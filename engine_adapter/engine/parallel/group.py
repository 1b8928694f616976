"""The processes of one model, joined by torch.distributed: NCCL between GPUs, gloo between CPUs.

They meet at a file, so that no port is needed. A sum is queued on the current stream like a kernel, and may be captured
in a graph where every process captures the same. A process that waits for another one longer than `TIMEOUT_S` ends:
then one of them has died, and no step can be completed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine_adapter.engine.parallel.shard import Shard

__all__ = ["TIMEOUT_S", "GroupSums", "join_group", "leave_group"]

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSums:
    """What all processes of a group do at once, in the same order, in place.

    `reduce` adds a tensor up over all of them. `agree` gives all of them that of the process that schedules: tokens
    that two devices chose by sums of their own could differ in a tie, and no process would notice.
    """

    reduce: Callable[[Tensor], None]
    agree: Callable[[Tensor], None]


def join_group(shard: Shard, meeting_file: Path, device: torch.device) -> GroupSums:
    """Meets the other processes.

    One group a process. `meeting_file` must not have been used before.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting_file}",
        rank=shard.rank,
        world_size=shard.size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    return GroupSums(reduce=_add_up, agree=_take_the_first)


def leave_group() -> None:
    """Ends it, when every process does. Graphs in which sums were captured must be gone: NCCL waits for that."""
    dist.destroy_process_group()


def _add_up(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _take_the_first(tensor: Tensor) -> None:
    dist.broadcast(tensor, src=0)
