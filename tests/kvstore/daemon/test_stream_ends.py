"""How a stream of an RPC ends, in the order in which grpc is told: a race that real streams lose once in a hundred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from kvstore.config import ServeConfig
from kvstore.daemon.stream import TOKEN_METADATA, SessionStreams
from kvstore.wire.v1 import kvstore_pb2 as pb


class Context:
    """Of grpc, as far as a stream needs it: a first answer is written until the stream ends."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.writes = asyncio.Event()

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((TOKEN_METADATA, bytes(16)),)

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        self.told.append("metadata")

    async def write(self, message: pb.ServerMessage) -> None:
        self.told.append("answer")
        self.writes.set()
        await asyncio.Event().wait()


def test_the_metadata_of_a_stream_go_before_its_first_answer() -> None:
    """They went with the first answer, and again with the status where the client had ended the stream during that one:
    grpc then sent no status, and the client waited to its deadline."""

    async def work() -> None:
        context: Any = Context()
        here = asyncio.Event()
        here.set()
        session = SimpleNamespace(
            id=1, name="x", all_here=here, lost=False, outbox=None, wants=False, post=None, last_sent=0
        )
        owner: Any = SimpleNamespace(
            store=SimpleNamespace(lost=lambda *_: None),
            config=ServeConfig(socket="/unused"),
            decisions=SimpleNamespace(decided=None, tier_changed=None),
            require_session=lambda _: session,
            sessions={1: session},
            counters=SimpleNamespace(add=lambda *_: None),
            settle_soon=lambda: None,
            now_ms=lambda: 0,
        )

        async def requests() -> AsyncIterator[pb.ClientMessage]:
            session.outbox.put(pb.ServerMessage(id=1))
            await context.writes.wait()
            return
            yield pb.ClientMessage()

        await SessionStreams(owner).serve(requests(), context)
        assert context.told == ["metadata", "answer"]
        assert session.lost
        assert session.outbox is None

    asyncio.run(work())
