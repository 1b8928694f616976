"""A member of a model that is shared among devices, over the store: a shard of every block, computed and copied here.

Starts like a member without the store (`engine.parallel.member`), with one socket more: its link, over which the
scheduling process has it join a session, map its shard of the HBM, and copy. It makes no calls to the daemon. It ends
with the scheduling process, whatever it is doing then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Pages
from engine_adapter.budget import device_spec
from engine_adapter.copying.copier import Copier, CopyBatch, Direction, TwinCopier
from engine_adapter.engine.parallel.member import (
    MemberPlan,
    end_with_the_scheduler,
    read_plan,
    serve_member,
)
from engine_adapter.group.copier import MAX_GROUP_BLOCKS
from engine_adapter.group.link import (
    Computing,
    Copied,
    Copy,
    Failed,
    Join,
    LinkMessage,
    Map,
    Mapped,
    Opened,
    receive,
    send,
)
from kvstore.client.device import open_device
from kvstore.client.group import Shard
from kvstore.client.member import MemberMemory
from kvstore.client.memory import DramListener
from kvstore.errors import InvalidArgument, KvstoreError, Unavailable
from kvstore.faults import fault
from tiers.base import Device

__all__: list[str] = []

_JOIN_S = 120.0
_GRACE_S = 1.0
"""The end of the scheduling process shows first in the sums that its death breaks, then on the link."""
_RETRY_S = 0.001


class _StoreMember:
    """The member's memory and copies. `run` has a thread of its own; the engine's asks for pages."""

    def __init__(self, plan: MemberPlan, link: socket.socket) -> None:
        self._link = link
        self._number = plan.shard.rank
        self._sending = threading.Lock()
        self._joined = threading.Event()
        self._device: Device = open_device(device_spec(plan.settings.device, 0))
        self._copier, listener = _copier(plan.settings.device)
        self._memory = MemberMemory(
            Shard(member=plan.shard.rank, members=plan.shard.size),
            plan.num_pages * plan.page_bytes,
            self._device,
            timeout_s=_JOIN_S,
            listener=listener,
        )
        self._send(Opened(uuid=self._device.uuid, identity=self._device.identity))
        fault("member.opened")

    def pages(self, page_bytes: int) -> Pages:
        """This member's pages. Waits until it has joined."""
        if not self._joined.wait(_JOIN_S):
            raise Unavailable("no session came to join")
        hbm = self._memory.hbm
        if hbm.slot_bytes != page_bytes:
            raise InvalidArgument(f"a shard of a block has {hbm.slot_bytes} bytes, the model's {page_bytes}")
        return Pages(
            address=hbm.base,
            count=hbm.num_pages_reserved,
            page_bytes=hbm.slot_bytes,
            device=hbm.device,
            owner=hbm,
        )

    def pages_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] pages of slots."""
        return self._memory.pages_of(slots.view(np.uint32))

    def run(self) -> None:
        """Does what the link says until it ends; then the process does."""
        try:
            while (message := receive(self._link)) is not None:
                self._handle(message)
        except (OSError, KvstoreError) as error:
            self.fail(error)
        os._exit(0)  # nothing of it may go on: a kernel that waits for the others would do so for ever

    def fail(self, error: BaseException) -> None:
        """Tells why this process ends."""
        text = " ".join(str(error).split())[:400]
        with contextlib.suppress(OSError):  # nobody is there to be told
            self._send(Failed(text=text))
        print(f"kvstore: process {self._number} of the model: {text}", file=sys.stderr)

    def _handle(self, message: LinkMessage) -> None:
        match message:
            case Join():
                token = bytes.fromhex(message.token)
                self._memory.join(message.path, token, message.slot_bytes, message.device)
                fault("member.joined")
                self._joined.set()
            case Map():
                self._memory.wait_pages(message.pages)
                self._send(Mapped())
            case Copy():
                self._copy(message)
            case Computing():
                self._copier.computing(message.steps)
            case _:
                raise InvalidArgument(f"{type(message).__name__} is not expected here")

    def _copy(self, message: Copy) -> None:
        hbm, dram = self._memory.copy_addresses(message.hbm_slots, message.dram_slots)
        load = message.direction is Direction.LOAD
        batch = CopyBatch(
            direction=message.direction,
            sources=dram if load else hbm,
            targets=hbm if load else dram,
            nbytes=self._memory.hbm.slot_bytes,
            done=lambda: self._tell_copied(message.number),
            failed=self._end,
        )
        while not self._copier.submit(batch):  # never for long: the group has the same bound
            time.sleep(_RETRY_S)

    def _end(self) -> None:
        """The copier has failed: what it had will never be complete, and the others wait for it."""
        self.fail(Unavailable("its copier has failed"))
        os._exit(1)

    def _tell_copied(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the scheduling process has gone: so will this one
            self._send(Copied(number=number))

    def _send(self, message: LinkMessage) -> None:
        with self._sending:
            send(self._link, message)


def _copier(device: str) -> tuple[Copier, DramListener | None]:
    """The copier of a device with the group's bound, and who pins DRAM for it."""
    if device == "cpu":
        return TwinCopier(max_blocks=2 * MAX_GROUP_BLOCKS), None
    from engine_adapter.copying.cuda_copier import CopyLimits, CudaCopier

    copier = CudaCopier(device_spec(device, 0).index, limits=CopyLimits(max_blocks=2 * MAX_GROUP_BLOCKS))
    return copier, copier


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--plan", required=True)
    given = parser.parse_args(arguments)
    end_with_the_scheduler()
    plan = read_plan(given.plan)
    steps, link = socket.socket(fileno=given.fd), socket.socket(fileno=given.link)
    try:
        store = _StoreMember(plan, link)
    except KvstoreError as error:
        send(link, Failed(text=str(error)))
        sys.exit(1)
    thread = threading.Thread(target=store.run, name="kvstore-link", daemon=True)
    thread.start()
    try:
        serve_member(plan, steps, store)
    except BaseException as error:
        time.sleep(_GRACE_S)
        store.fail(error)
        raise
    thread.join()  # copies go on until the session has ended


if __name__ == "__main__":
    _main(sys.argv[1:])
