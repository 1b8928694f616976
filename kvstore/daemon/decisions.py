"""What clients say they decided: how prompts got what is cached below HBM, and which tiers they took out of use.

Only remembered and shown: in the flight recorder, in the status by session, and for explain by the last block of the
prefix. Bounded: so many decisions over all sessions, the oldest forgotten. Owner loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping

from kvstore.daemon.counters import Counters
from kvstore.daemon.log import Log
from kvstore.daemon.session import Session
from kvstore.errors import InvalidArgument
from kvstore.layout import Tier
from kvstore.moves import U64, NamespaceId, SessionId
from kvstore.recorder import Event, Recorder
from kvstore.units import format_count, format_duration
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Decisions"]

_REMEMBERED = 4096
_HASH_BYTES = 16
_TIERS = {"dram": Tier.DRAM, "nvme": Tier.NVME}
_NAMES = {"dram": "dram", "nvme": "disk"}
_WAYS = {
    pb.LOAD_WAY_LOAD: "load_requests",
    pb.LOAD_WAY_COMPUTE: "compute_requests",
    pb.LOAD_WAY_BOTH_ENDS: "both_ends_requests",
}
_LOG = Log("decisions")


class Decisions:
    """See the module."""

    def __init__(self, counters: Counters, recorder: Recorder, warnings: MutableMapping[str, str]) -> None:
        """`warnings`: of the daemon, by topic; a tier that is out of use is one."""
        self._counters = counters
        self._recorder = recorder
        self._warnings = warnings
        self._stats: dict[SessionId, pb.LoadStats] = {}
        self._by_block: OrderedDict[tuple[NamespaceId, bytes], str] = OrderedDict()

    def decided(self, session: Session, message: pb.ClientMessage) -> None:
        """A request's way. Raises: InvalidArgument for one that cannot be, and for a namespace not opened."""
        decision = message.decision
        namespace = session.namespaces.get(decision.namespace)
        if namespace is None or len(decision.block) != _HASH_BYTES or decision.tier not in _TIERS:
            raise InvalidArgument("a decision names an open namespace, a block by 16 bytes, and dram or nvme")
        if decision.loaded_blocks > decision.cached_blocks or decision.way not in _WAYS:
            raise InvalidArgument("a decision loads no more than is cached, in a way that this daemon knows")
        computed = decision.cached_blocks - decision.loaded_blocks
        told = _in_words(decision)
        stats = self._stats.setdefault(session.id, pb.LoadStats())
        name = _WAYS[decision.way]
        setattr(stats, name, getattr(stats, name) + 1)
        stats.loaded_blocks += decision.loaded_blocks
        stats.computed_blocks += computed
        stats.last = told
        self._counters.add(f"plan_{name}_total")
        self._counters.add("plan_loaded_blocks_total", decision.loaded_blocks)
        self._counters.add("plan_computed_blocks_total", computed)
        self._recorder.note(
            Event.PLAN,
            session.id,
            decision.cached_blocks,
            decision.loaded_blocks,
            int(_TIERS[decision.tier]),
            int(decision.bytes_per_s),
            decision.block,
        )
        self._by_block[namespace, decision.block] = told
        self._by_block.move_to_end((namespace, decision.block))
        if len(self._by_block) > _REMEMBERED:
            self._by_block.popitem(last=False)

    def tier_changed(self, session: Session, message: pb.ClientMessage) -> None:
        """A tier that a client uses no more, or again. Raises: InvalidArgument for a tier that there is not."""
        change = message.tier_change
        if change.tier not in _TIERS or change.use not in pb.TierUse.values():
            raise InvalidArgument("a change of use names dram or nvme, and a use that this daemon knows")
        stats = self._stats.setdefault(session.id, pb.LoadStats())
        others = [known for known in stats.tiers if known.tier != change.tier]
        del stats.tiers[:]
        stats.tiers.extend(others)
        topic = f"guard.{session.id}.{change.tier}"
        self._warnings.pop(topic, None)
        if change.use != pb.TIER_USE_IN_USE:
            stats.tiers.append(change)
        if change.use == pb.TIER_USE_OUT:
            self._counters.add("guard_tiers_out_total")
            self._warnings[topic] = (
                f"{session.name} has taken {change.tier} out of use for {format_duration(round(change.pause_s))}: "
                f"it cost {change.spent_s:.2f} s and saved {change.saved_s:.2f} s"
            )
            _LOG.warning("tier out of use", session=session.id, name=session.name, tier=change.tier)
        use = change.use
        self._recorder.note(Event.TIER_USE, session.id, int(use), int(_TIERS[change.tier]))

    def of_session(self, session: SessionId) -> pb.LoadStats | None:
        """Since it attached; None: nothing."""
        return self._stats.get(session)

    def explain(self, namespace: NamespaceId, hashes: U64) -> str:
        """The decision about the longest part of this chain that one is remembered of; empty: none."""
        if not self._by_block:
            return ""
        packed = hashes.tobytes()
        for end in range(len(packed), 0, -_HASH_BYTES):
            told = self._by_block.get((namespace, packed[end - _HASH_BYTES : end]))
            if told is not None:
                return told
        return ""

    def session_ended(self, session: Session) -> None:
        """Forgets what is shown of a session."""
        self._stats.pop(session.id, None)
        for tier in _TIERS:
            self._warnings.pop(f"guard.{session.id}.{tier}", None)


def _in_words(decision: pb.LoadDecision) -> str:
    """`loaded 96 of 128 blocks from nvme, computed 32: disk 0.4 GB/s`."""
    loaded, cached = decision.loaded_blocks, decision.cached_blocks
    told = f"loaded {format_count(loaded)} of {format_count(cached)} blocks from {decision.tier} or nearer"
    if loaded < cached:
        told += f", computed {format_count(cached - loaded)}"
    if decision.way == pb.LOAD_WAY_BOTH_ENDS:
        told += " meanwhile"
    if decision.bytes_per_s:
        told += f": {_NAMES[decision.tier]} {decision.bytes_per_s / 1e9:.3g} GB/s"
    if decision.expected_s:
        told += (
            f"; {decision.expected_s * 1e3:.3g} ms expected, {decision.load_all_s * 1e3:.3g} ms to load all, "
            f"{decision.compute_all_s * 1e3:.3g} ms to compute all"
        )
    return told
