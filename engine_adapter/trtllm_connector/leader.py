"""The half of TensorRT-LLM's connector that schedules, on its first rank: lookups, plans, and seals.

A request, in the order of TensorRT-LLM's calls:

    matched → allocated → [a step's plan has its load; it is left out of steps until all ranks have copied]
            → planned, each step: full blocks of confirmed tokens are stored → finished

What `matched` answers is kept (`promises`). Stores go by `external.scheduling`, as for other engines. The engine's
thread calls; what ranks say comes on threads of the channel, so all of it is under one lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from engine_adapter.external.jobs import StepPlan, StepReport
from engine_adapter.external.link import Identity, LinkPlan, StoreLink
from engine_adapter.external.options import ConnectorOptions, cache_use
from engine_adapter.external.pages import part_bytes
from engine_adapter.external.ranks import RankGroup
from engine_adapter.external.request import RequestFacts
from engine_adapter.external.scheduling import Scheduling, SchedulingRules
from engine_adapter.trtllm_connector.channel import Hello, LeaderChannel
from engine_adapter.trtllm_connector.identity import KvShape, identity_of, namespace_parts, require_supported
from engine_adapter.trtllm_connector.promises import Promises
from kvstore.errors import KvstoreError
from kvstore.geometry import Geometry, LayerGroup

__all__ = ["LeaderHalf", "StepMetadata"]

_LOG = logging.getLogger("kvstore.trtllm")
_CLOSE_S = 10.0
_ROOM_BLOCKS = 256


@dataclass(frozen=True)
class StepMetadata:
    """From the leader to every rank, each step; TensorRT-LLM carries it."""

    leader: str  # where ranks say what they have done
    plan: StepPlan


@dataclass(slots=True)
class _Table:
    """A request as the steps tell of it."""

    lease: int
    identity: Identity
    tokens: list[int] = field(default_factory=list)  # confirmed
    blocks: list[int] = field(default_factory=list)  # the engine's, -1 where there is none


class LeaderHalf:
    """See the module."""

    def __init__(
        self,
        args: Any,
        options: ConnectorOptions,
        version: str,
        *,
        find_folder: Callable[[str, str | None], str | None],
    ) -> None:
        self._args = args
        self._options = options
        self._version = version
        self._find_folder = find_folder
        self._lock = threading.RLock()
        self._hellos: dict[int, Hello] = {}
        self._tables: dict[str, _Table] = {}
        self._leases = count(1 << 32)  # apart from those of Scheduling
        self._numbers: Iterator[int] = count(-1, -1)  # likewise
        self._link: StoreLink | None = None
        self._scheduling: Scheduling | None = None
        self._promises: Promises | None = None
        self._block_tokens = 0
        self._refused = ""
        self._channel = LeaderChannel(self)

    # ------------------------------------------------------------ the engine's calls

    def matched(self, request: Any, computed_tokens: int) -> int:
        """Tokens of a new request that will be loaded, behind the `computed_tokens` that the engine has itself."""
        with self._lock:
            name = str(request.request_id)
            self._forget(name)
            identity = identity_of(request)
            if self._scheduling is None or identity is None:
                return 0
            table = _Table(lease=next(self._leases), identity=identity, tokens=list(request.get_tokens(0)))
            self._tables[name] = table
            self._scheduling.new(RequestFacts(id=name, token_ids=table.tokens, identity=identity))
            tokens = self._promise(name, table, computed_tokens)
            if not tokens:
                self._scheduling.had(name, computed_tokens)
            return tokens

    def _promise(self, name: str, table: _Table, computed_tokens: int) -> int:
        assert self._link is not None
        assert self._promises is not None
        session, namespace = self._link.session, self._link.namespace(table.identity)
        begin, odd = divmod(computed_tokens, self._block_tokens)
        if session is None or namespace is None or odd:
            return 0
        most = min((len(table.tokens) - 1) // self._block_tokens, session.max_message_blocks)
        if most <= begin:
            return 0
        hashes = namespace.chain(table.tokens).hashes[:most]
        blocks = self._promises.make(name, session, namespace, table.lease, hashes, begin)
        return blocks * self._block_tokens

    def allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        """The engine has taken pages. Raises KvstoreError where it took too few for what was promised."""
        with self._lock:
            name = str(request.request_id)
            if self._scheduling is None or self._promises is None or name not in self._tables:
                return
            pages = _pages(block_ids)
            self._promises.allocated(name, pages)
            self._scheduling.allocated(name, (pages,), 0)

    def plan(self, output: Any) -> StepMetadata:
        """For the step that begins now."""
        with self._lock:
            plan = StepPlan()
            if self._scheduling is not None and self._promises is not None:
                computed = [*self._absorb(output)]
                plan = self._scheduling.plan(computed, (), self._block_ids)
                plan = replace(plan, loads=tuple(self._promises.starting(self._numbers)), held={})
            return StepMetadata(leader=self._channel.name, plan=plan)

    def _absorb(self, output: Any) -> Iterator[tuple[str, int]]:
        """What the step says of its requests: each with how many of its tokens have KV after it."""
        for data, is_new in [(data, True) for data in output.new_requests] + [
            (data, False) for data in output.cached_requests
        ]:
            name = str(data.request_id)
            table = self._tables.get(name)
            if table is None:
                continue
            if is_new:
                table.tokens[:], table.blocks[:] = data.new_tokens, data.new_block_ids
            else:
                table.tokens += data.new_tokens
                table.blocks += data.new_block_ids
            yield name, data.computed_position + data.num_scheduled_tokens

    def _block_ids(self, name: str) -> tuple[list[int], ...] | None:
        table = self._tables.get(name)
        return None if table is None else (_pages(table.blocks),)

    def finished(self, request: Any) -> bool:
        """The request has ended or is preempted. True: its pages are in use until every rank has named it as sent."""
        with self._lock:
            return self._forget(str(request.request_id))

    def _forget(self, name: str) -> bool:
        table = self._tables.pop(name, None)
        if table is None or self._scheduling is None or self._promises is None:
            return False
        self._promises.withdraw(name)
        session = None if self._link is None else self._link.attached
        if session is not None:
            session.cancel(table.lease)
        storing = self._scheduling.ended(name, (), 0)
        return self._promises.loading(name) or storing

    def withdrawn(self, request: Any) -> None:
        """The engine has changed its mind: it will not use what was promised."""
        with self._lock:
            if self._promises is not None:
                self._promises.withdraw(str(request.request_id))

    def close(self) -> None:
        """Gives the session up. The ranks copy no more."""
        self._channel.close(_CLOSE_S)
        if self._link is not None:
            self._link.close(_CLOSE_S)

    # ------------------------------------------------------------ what ranks say

    def hello(self, said: Hello) -> None:
        """See RankNews. With the last rank the session begins."""
        with self._lock:
            self._hellos[said.rank] = said
            if len(self._hellos) < said.world or self._scheduling is not None:
                return
            try:
                self._begin([self._hellos[rank] for rank in sorted(self._hellos)])
            except KvstoreError as error:
                _LOG.warning("kvstore: %s: TensorRT-LLM serves without the store", error)

    def done(self, report: StepReport) -> None:
        """See RankNews."""
        with self._lock:
            if self._scheduling is None or self._promises is None:
                return
            for number in [number for number in report.done if number in self._promises]:
                del report.done[number]
                self._promises.ended(number)
            self._scheduling.report(report)

    def _begin(self, ranks: Sequence[Hello]) -> None:
        """Attaches in the background. Raises KvstoreError where these ranks cannot have a session."""
        require_supported(self._args)
        why_not = next((rank.why_not for rank in ranks if rank.why_not), "")
        if not why_not and len({(rank.order, rank.payload_bytes, rank.world) for rank in ranks}) != 1:
            why_not = "its ranks keep their KV differently"
        if why_not:
            raise KvstoreError(why_not)
        world, payload_bytes = len(ranks), ranks[0].payload_bytes
        self._block_tokens = int(self._args.kv_cache_config.tokens_per_block)
        shape = KvShape(
            block_tokens=self._block_tokens,
            payload_bytes=payload_bytes,
            order=ranks[0].order,
            ranks=world,
        )
        self._link = StoreLink(
            LinkPlan(
                socket=self._options.socket or None,
                name=self._options.name or f"tensorrt-llm {Path(str(self._args.model)).name}",
                timeout_s=self._options.timeout_s,
                geometry=_geometry(self._block_tokens, world * part_bytes(payload_bytes)),
                group=RankGroup([rank.listener for rank in ranks], timeout_s=self._options.timeout_s),
                room_blocks=self._options.room_blocks or _ROOM_BLOCKS,
                parts=lambda identity: self._parts(shape, identity),
                breaker_s=self._options.breaker_s,
                use=cache_use(self._options.cache),
                tenant=self._options.tenant,
            )
        )
        self._link.namespace(Identity())  # opens it as soon as there is a session
        rules = SchedulingRules(block_tokens=self._block_tokens, ranks=world)
        self._scheduling = Scheduling(self._link, rules)
        self._promises = Promises(
            ranks=world,
            answer_s=self._options.answer_patience_s,
            disk_s=self._options.lookup_patience_s,
        )

    def _parts(self, shape: KvShape, identity: Identity) -> Mapping[str, bytes]:
        return namespace_parts(self._args, self._version, shape, identity, find_folder=self._find_folder)


def _pages(block_ids: Sequence[int]) -> list[int]:
    """Blocks as `external` counts them: from 1 on, and 0 is none."""
    return [block + 1 for block in block_ids]


def _geometry(block_tokens: int, nbytes: int) -> Geometry:
    head_dim = -(-nbytes // (2 * block_tokens))
    layers = LayerGroup(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=block_tokens)
    return Geometry(groups=(layers,), dtype="float8_e4m3fn")  # bytes
