"""A prefix from both ends: which blocks to load next from the back, and how far to compute from the front meanwhile.

Owns the state of one request between its plan and the moment when both ends meet; whoever does the loads and the
computation tells it and asks it. It needs no estimate to end well: loads go on from the back and steps from the front
until there is nothing between them, so wrong speeds cost one step or one piece. With speeds it chooses the last steps
so that both end together. Blocks are counted from the request's first. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.planning.speeds import PrefillSpeed, TierSpeed

__all__ = ["Meeting", "Piece", "piece_blocks"]

_Speeds: TypeAlias = tuple[PrefillSpeed | None, TierSpeed | None]
_PIECE_S = 0.02
"""What the load of a piece should take: short beside what both ends save, long beside its messages."""
_PIECES = 8
"""Into so many pieces a short load is cut, so that both ends can meet anywhere."""
_FIRST_PIECE_BYTES, _MOST_PIECE_BYTES = 256 << 10, 256 << 20
_FIRST_TOKENS = 64
"""A step of an engine that was not measured; the next ones double, so that little is computed in vain."""
_PROVEN_TOKENS = 512
_LATE, _LATE_S = 1.5, 0.002
_PIECES_AHEAD = 3
"""So many are asked for at a time: a disk is never without work, little is read in vain, and the last comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks [begin, end), loaded together."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def piece_blocks(blocks: int, slot_bytes: int, speed: TierSpeed | None) -> int:
    """Blocks of a piece where so many may have to be loaded from a tier of this speed; at least one."""
    if speed is None:
        return max(1, _FIRST_PIECE_BYTES // slot_bytes)
    # A smaller one than the first costs its messages: measured by such, a disk looks slower, and pieces become smaller.
    timely = max(int(speed.bytes_per_s * _PIECE_S), _FIRST_PIECE_BYTES)
    wanted = min(timely, -(-blocks // _PIECES) * slot_bytes, _MOST_PIECE_BYTES)
    return max(1, wanted // slot_bytes)


class Meeting:
    """Blocks [begin, end) of a request: computed upwards from `begin`, loaded downwards from `end`."""

    __slots__ = ("_asked", "_failed", "_loaded", "_lowest", "_since", "begin", "computed", "end", "piece")

    def __init__(self, *, begin: int, end: int, piece: int) -> None:
        self.begin = begin
        self.end = end
        self.piece = piece
        """Blocks of the pieces that are not asked for yet."""
        self.computed = begin
        """Blocks before this one are computed or loaded, or will be computed by steps that are under way."""
        self._lowest = end  # blocks from this one on were asked for
        self._asked: dict[int, Piece] = {}  # by their begin
        self._loaded: dict[int, int] = {}  # begin to end, of runs of loaded blocks
        self._failed = False
        self._since = 0.0  # when the first load was asked for, or the last one came

    @property
    def next_loaded(self) -> Piece:
        """The first run of loaded blocks that is not computed; what is behind the end, where there is none."""
        runs = [(begin, end) for begin, end in self._loaded.items() if end > self.computed]
        begin, end = min(runs, default=(self.end, self.end))
        return Piece(begin=max(begin, min(self.computed, end)), end=end)

    def ask(self, now: float) -> list[Piece]:
        """Pieces to load now, the first soonest."""
        found: list[Piece] = []
        if not self._asked:
            self._since = now
        while not self._failed and len(self._asked) < _PIECES_AHEAD and self._lowest > self.computed:
            piece = Piece(begin=max(self._lowest - self.piece, self.computed), end=self._lowest)
            self._asked[piece.begin] = piece
            self._lowest = piece.begin
            found.append(piece)
        return found

    def loaded(self, piece: Piece, now: float) -> None:
        """Its blocks are there."""
        if self._asked.pop(piece.begin, None) is None:
            return
        self._since = now
        begin, end = piece.begin, piece.end
        end = self._loaded.pop(end, end)
        before = [first for first, last in self._loaded.items() if last == begin]
        self._loaded[before[0] if before else begin] = end

    def failed(self, piece: Piece) -> None:
        """Its blocks do not come: they are computed, and nothing more is asked for."""
        self._asked.pop(piece.begin, None)
        self._failed = True

    def advance(self, computed: int) -> None:
        """So many blocks are computed or loaded without a gap, or will be by steps that are under way."""
        self.computed = max(self.computed, computed)

    def unneeded(self, piece: Piece) -> bool:
        """Whether a load that was asked for would change nothing any more."""
        return piece.end <= self.computed

    def stop(
        self,
        tokens: int,
        now: float,
        block_tokens: int,
        slot_bytes: int,
        speeds: _Speeds,
        *,
        waits: bool = True,
    ) -> int:
        """How far (a block) the next step should compute, so that it ends when what lies behind is loaded.

        `tokens`: computed so far; the block that they end in means: wait for the loads, which are expected sooner than
        anything could be computed in their place. Nobody waits for one that is late, since the disk is slower than it
        was taken for, and nobody does where not `waits`. Never into loaded blocks. O(pieces between both ends).
        """
        prefill, tier = speeds
        ready = self.next_loaded.begin
        here = tokens // block_tokens
        proven = _FIRST_TOKENS if prefill is None else max(_FIRST_TOKENS, 2 * prefill.proven_tokens)
        farthest = min(ready, max(here + 1, (tokens + proven) // block_tokens))
        if prefill is None or tier is None or not self._asked:
            return farthest
        elapsed_s = now - self._since

        def cost(edge: int) -> float:
            end = edge * block_tokens
            computed_s = prefill.seconds(tokens, end, max(1, end - tokens))
            loaded_s = (ready - edge) * slot_bytes * tier.byte_s
            if loaded_s:
                loaded_s += tier.start_s
                loaded_s = max(loaded_s - elapsed_s, elapsed_s - loaded_s)
            return max(computed_s, loaded_s)

        # One that was measured in small steps alone may be faster than it looks: it goes on.
        waits &= prefill.proven_tokens >= min(_PROVEN_TOKENS, (ready - here) * block_tokens)
        oldest = next(iter(self._asked.values()))
        waits &= elapsed_s <= _LATE * tier.seconds(len(oldest) * slot_bytes) + _LATE_S
        edges = [edge for edge in self._edges(ready) if edge <= farthest and (waits or edge > here)]
        return min((*edges, farthest), key=cost)

    def _edges(self, ready: int) -> Iterable[int]:
        """Where a step may end: in front of each piece that is or may yet be asked for, and of what is loaded."""
        yield ready
        yield from (piece.begin for piece in self._asked.values() if piece.begin >= self.computed)
        edge = self._lowest
        while edge > self.computed:
            yield edge
            edge -= self.piece
        yield self.computed
