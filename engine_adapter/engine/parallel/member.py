"""A member: a process with one shard of a model and of its pages, which computes what it is told.

Its plan comes on the command line as one JSON object, its steps over a socket that it inherits. It answers nothing
but one byte when it is ready: that its part of a step is done shows in the sums that the scheduling process waits for.
It ends when that socket does. Its pages are its own memory, or what `MemberPages` has in store for it.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Pages
from engine_adapter.engine.parallel.messages import StepReader, receive
from engine_adapter.engine.parallel.shard import Shard
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model, find_shape
from kvstore.errors import Unavailable

__all__ = [
    "Member",
    "MemberPages",
    "MemberPlan",
    "end_with_the_scheduler",
    "read_plan",
    "serve_member",
    "spawn_members",
]

_READY = b"r"
_START_S = 300.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """All that a member has to know. `seed`: of random weights, None for those on disk. A page is a shard's.

    `meeting_fd`: a file in memory, under the same number in every process of the group, which is gone with the last.
    """

    model: str
    seed: int | None
    settings: EngineSettings
    shard: Shard
    num_pages: int
    page_bytes: int
    block_tokens: int
    meeting_fd: int

    @property
    def meeting_file(self) -> Path:
        """Where this process finds it."""
        return Path(f"/proc/self/fd/{self.meeting_fd}")


class MemberPages(Protocol):
    """Where a member's pages are, and which of them a step means."""

    def pages(self, page_bytes: int) -> Pages:
        """All of them. May wait until they are there."""
        ...

    def pages_of(self, table: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] this process's pages, of a block table as the scheduling process sends it."""
        ...


class Member:
    """The process, seen from the one that schedules."""

    def __init__(
        self,
        plan: MemberPlan,
        module: str = "engine_adapter.engine.parallel.member",
        sockets: Sequence[tuple[str, socket.socket]] = (),
    ) -> None:
        """`module` is what runs there; it inherits more `sockets`, each as the descriptor after its flag."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            fds = {"--fd": theirs.fileno()} | {flag: sock.fileno() for flag, sock in sockets}
            command = [sys.executable, "-m", module, "--plan", json.dumps(asdict(plan))]
            command += [word for flag, fd in fds.items() for word in (flag, str(fd))]
            self._process = subprocess.Popen(command, pass_fds=[*fds.values(), plan.meeting_fd])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def await_ready(self) -> None:
        """Raises Unavailable when it ends instead."""
        self.connection.settimeout(_START_S)
        try:
            answer = self.connection.recv(1)
        except OSError as error:
            raise Unavailable(f"a member did not start: {error}") from error
        if answer != _READY:
            raise Unavailable("a member ended while it started")
        self.connection.settimeout(None)

    def part(self) -> None:
        """Let it end."""
        self.connection.close()

    def close(self) -> None:
        """It has ended afterwards, by force if need be."""
        self.part()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


M = TypeVar("M", bound=Member)


@contextmanager
def spawn_members(plans: Sequence[MemberPlan], start: Callable[[MemberPlan], M]) -> Iterator[list[M]]:
    """Starts them; they have ended at the end of the `with`. They are ready only once the own shard joins the group."""
    with ExitStack() as stack:
        members: list[M] = []
        for plan in plans:
            members.append(start(plan))
            stack.callback(members[-1].close)
        yield members


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--plan", required=True)
    given = parser.parse_args(arguments)
    end_with_the_scheduler()
    plan = read_plan(given.plan)
    with socket.socket(fileno=given.fd) as connection:
        serve_member(plan, connection, _OwnPages(plan))


def end_with_the_scheduler() -> None:
    """Signals that a terminal or a supervisor sends to all processes are the scheduling one's: it ends the others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _OwnPages:
    """Pages in this process's own memory, by the numbers that they have everywhere."""

    def __init__(self, plan: MemberPlan) -> None:
        self._plan = plan

    def pages(self, page_bytes: int) -> Pages:
        return PlainBlockManager(
            num_pages=self._plan.num_pages,
            page_bytes=page_bytes,
            block_tokens=self._plan.block_tokens,
            device=self._plan.settings.device,
        ).kv_pages()

    def pages_of(self, table: NDArray[np.int32]) -> NDArray[np.int32]:
        return table


def read_plan(text: str) -> MemberPlan:
    """The plan of a command line."""
    plan = json.loads(text)
    plan["settings"] = EngineSettings(**plan["settings"])
    plan["shard"] = Shard(**plan["shard"])
    return MemberPlan(**plan)


def serve_member(plan: MemberPlan, connection: socket.socket, memory: MemberPages) -> None:
    """Computes what comes over the connection until it ends."""
    import torch

    if plan.settings.device != "cpu":
        torch.cuda.set_device(plan.settings.device)  # else what names no device takes memory of the first one
    from engine_adapter.engine.kv_pool import view_pages
    from engine_adapter.engine.parallel.group import leave_group
    from engine_adapter.engine.parallel.loading import load_shard
    from engine_adapter.engine.runners import make_shard_runner

    source = find_model(plan.model) if plan.seed is None else find_shape(plan.model, plan.seed)
    pages = memory.pages(
        plan.page_bytes
    )  # first: what earlier processes left must be known before weights take room
    shard = load_shard(source, plan.settings, plan.shard, plan.meeting_file)
    config, dtype = shard.loaded.config, shard.loaded.model.dtype
    pool = view_pages(pages, config, plan.block_tokens, dtype)
    runner = make_shard_runner(shard.loaded, pool, plan.settings, shard.group)
    connection.sendall(_READY)
    reader = StepReader(memory.pages_of)
    while (message := receive(connection)) is not None:
        if message[0]:
            step = reader.decode(message)
            runner.launch(step.chunks, step.tables)
        else:
            runner.prepare()
    runner.drop_graphs()
    overdue = threading.Timer(_STOP_S, os._exit, (1,))  # where the others were killed, NCCL waits for ever
    overdue.daemon = True
    overdue.start()
    leave_group()
    overdue.cancel()


if __name__ == "__main__":
    _main(sys.argv[1:])
