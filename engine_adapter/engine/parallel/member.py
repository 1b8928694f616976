"""A member: a process with one shard of a model and of its pages, which computes what it is told.

Its plan comes on the command line as one JSON object, its steps over a socket that it inherits. It answers nothing
but one byte when it is ready: that its part of a step is done shows in the sums that the scheduling process waits for.
It ends when that socket does.
"""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_adapter.engine.parallel.messages import StepReader, receive
from engine_adapter.engine.parallel.shard import Shard
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model, find_shape
from kvstore.errors import Unavailable

__all__ = ["Member", "MemberPlan", "spawn_members"]

_READY = b"r"
_START_S = 300.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """All that a member has to know. `seed`: of random weights, None for those on disk."""

    model: str
    seed: int | None
    settings: EngineSettings
    shard: Shard
    num_pages: int
    block_tokens: int
    meeting_file: str


class Member:
    """The process, seen from the one that schedules."""

    def __init__(self, plan: MemberPlan) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine_adapter.engine.parallel.member"]
            command += ["--fd", str(theirs.fileno()), "--plan", json.dumps(asdict(plan))]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

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


@contextmanager
def spawn_members(plans: Sequence[MemberPlan]) -> Iterator[list[Member]]:
    """Starts them; they have ended at the end of the `with`. They are ready only once the own shard joins the group."""
    with ExitStack() as stack:
        members = []
        for plan in plans:
            members.append(Member(plan))
            stack.callback(members[-1].close)
        yield members


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--plan", required=True)
    given = parser.parse_args(arguments)
    with socket.socket(fileno=given.fd) as connection:
        _serve(_read_plan(given.plan), connection)


def _read_plan(text: str) -> MemberPlan:
    plan = json.loads(text)
    plan["settings"] = EngineSettings(**plan["settings"])
    plan["shard"] = Shard(**plan["shard"])
    return MemberPlan(**plan)


def _serve(plan: MemberPlan, connection: socket.socket) -> None:
    from engine_adapter.engine.kv_pool import view_pages
    from engine_adapter.engine.parallel.group import leave_group
    from engine_adapter.engine.parallel.loading import load_shard
    from engine_adapter.engine.plain import PlainBlockManager
    from engine_adapter.engine.runners import make_shard_runner

    source = find_model(plan.model) if plan.seed is None else find_shape(plan.model, plan.seed)
    shard = load_shard(source, plan.settings, plan.shard, Path(plan.meeting_file))
    config, dtype = shard.loaded.config, shard.loaded.model.dtype
    pages = PlainBlockManager(
        num_pages=plan.num_pages,
        page_bytes=config.page_bytes(plan.block_tokens, dtype.itemsize),
        block_tokens=plan.block_tokens,
        device=plan.settings.device,
    ).kv_pages()
    pool = view_pages(pages, config, plan.block_tokens, dtype)
    runner = make_shard_runner(shard.loaded, pool, plan.settings, shard.reduce)
    connection.sendall(_READY)
    reader = StepReader()
    while (message := receive(connection)) is not None:
        if message[0]:
            step = reader.decode(message)
            runner.launch(step.chunks, step.tables)
        else:
            runner.prepare()
    leave_group()


if __name__ == "__main__":
    _main(sys.argv[1:])
