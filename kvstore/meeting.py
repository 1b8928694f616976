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

from kvstore.speeds import PrefillSpeed, TierSpeed

__all__ = ["Meeting", "Piece", "Pieces", "cut"]

_Speeds: TypeAlias = tuple[PrefillSpeed | None, TierSpeed | None]
_PIECE_S = 0.02
"""What the load of a piece should take, at least: long beside its messages."""
_PIECES_A_STEP = 4
"""What it should take at most, in parts of a step: whoever computes looks after loads between two steps only."""
_PIECES = 8
"""Into so many pieces a short load is cut, so that both ends can meet anywhere."""
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 20, 1 << 30
_FIRST_TOKENS = 64
"""A step of an engine that was not measured; the next ones double, so that little is computed in vain."""
_PROVEN_TOKENS = 512
_LEAST_AHEAD, _MOST_AHEAD = 3, 64
"""Pieces asked for at a time: a disk is never without work during a step, and little is read in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks [begin, end), loaded together."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How the loads of one request are cut."""

    blocks: int
    """Of one piece."""
    ahead: int
    """Asked for at a time."""


def cut(blocks: int, slot_bytes: int, at: int, chunk_tokens: int, speeds: _Speeds) -> Pieces:
    """For a request of which so many blocks may have to be loaded while it computes from token `at` on."""
    prefill, tier = speeds
    if prefill is None or tier is None:
        return Pieces(blocks=max(1, _LEAST_PIECE_BYTES // slot_bytes), ahead=_MOST_AHEAD)
    step_s = prefill.seconds(at, at + chunk_tokens, chunk_tokens)
    longest = int(tier.bytes_per_s * max(_PIECE_S, step_s / _PIECES_A_STEP))
    wanted = min(longest, -(-blocks // _PIECES) * slot_bytes)
    size = max(1, min(max(wanted, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES) // slot_bytes)
    ahead = 2 + int(1.5 * step_s * tier.bytes_per_s / (size * slot_bytes))
    return Pieces(blocks=size, ahead=min(max(ahead, _LEAST_AHEAD), _MOST_AHEAD))


class Meeting:
    """Blocks [begin, end) of a request: computed upwards from `begin`, loaded downwards from `end`."""

    __slots__ = (
        "_asked",
        "_loaded",
        "_lowest",
        "_over",
        "_since",
        "begin",
        "computed",
        "end",
        "pieces",
        "ready",
    )

    def __init__(self, *, begin: int, end: int, pieces: Pieces) -> None:
        self.begin = begin
        self.end = end
        self.pieces = pieces
        """May be changed for what is not asked for yet."""
        self.computed = begin
        """Blocks before this one are computed, or will be by steps that are under way."""
        self.ready = end
        """Blocks from this one up to `end` are loaded."""
        self._lowest = end  # blocks from this one on were asked for
        self._asked: dict[int, Piece] = {}  # by their end
        self._loaded: dict[int, Piece] = {}  # the same, loaded while one behind it is not
        self._over = False
        self._since = 0.0  # when the first load was asked for, or the last one came

    @property
    def over(self) -> bool:
        """Nothing more is to be loaded."""
        return self._over

    def ask(self, now: float) -> list[Piece]:
        """Pieces to load now, the first soonest."""
        found: list[Piece] = []
        if not self._asked:
            self._since = now
        while not self._over and len(self._asked) < self.pieces.ahead and self._lowest > self.computed:
            piece = Piece(begin=max(self._lowest - self.pieces.blocks, self.computed), end=self._lowest)
            self._asked[piece.end] = piece
            self._lowest = piece.begin
            found.append(piece)
        return found

    def loaded(self, piece: Piece, now: float) -> None:
        """Its blocks are there."""
        if self._asked.pop(piece.end, None) is None:
            return
        self._since = now
        self._loaded[piece.end] = piece
        while (below := self._loaded.pop(self.ready, None)) is not None:
            self.ready = below.begin

    def failed(self, piece: Piece) -> None:
        """Its blocks do not come: what lies in front of it is computed, and nothing more is asked for."""
        self._asked.pop(piece.end, None)
        self._over = True

    def advance(self, computed: int) -> None:
        """So many blocks are computed, or under way."""
        self.computed = max(self.computed, computed)
        if self.computed >= self.ready:
            self._over = True

    def unneeded(self, piece: Piece) -> bool:
        """Whether a load that was asked for would change nothing any more."""
        return self._over and (piece.end > self.ready or piece.begin < self.computed)

    def stop(self, tokens: int, now: float, block_tokens: int, slot_bytes: int, speeds: _Speeds) -> int:
        """How far (a block) the next step should compute, so that it ends when what lies behind is loaded.

        `tokens`: computed so far; the block that they end in means: wait for the loads, which are expected sooner than
        anything could be computed in their place. A load that is late is expected later and later, so nobody waits for
        one that hangs. O(pieces between both ends).
        """
        prefill, tier = speeds
        if self._over:
            return self.ready
        here = tokens // block_tokens
        proven = _FIRST_TOKENS if prefill is None else max(_FIRST_TOKENS, 2 * prefill.proven_tokens)
        farthest = min(self.ready, max(here + 1, (tokens + proven) // block_tokens))
        if prefill is None or tier is None:
            return farthest
        elapsed_s = now - self._since

        def cost(edge: int) -> float:
            end = edge * block_tokens
            computed_s = prefill.seconds(tokens, end, max(1, end - tokens))
            loaded_s = (self.ready - edge) * slot_bytes * tier.byte_s
            if loaded_s:
                loaded_s += tier.start_s
                loaded_s = max(loaded_s - elapsed_s, elapsed_s - loaded_s)
            return max(computed_s, loaded_s)

        # One that was measured in small steps alone may be faster than it looks: it goes on.
        waits = prefill.proven_tokens >= min(_PROVEN_TOKENS, (self.ready - here) * block_tokens)
        edges = [edge for edge in self._edges() if edge <= farthest and (waits or edge > here)]
        return min((*edges, farthest), key=cost)

    def _edges(self) -> Iterable[int]:
        """Where a step may end: in front of each piece that is or may yet be asked for, and of what is loaded."""
        yield self.ready
        yield from (piece.begin for piece in self._asked.values())
        edge = self._lowest
        while edge > self.computed:
            yield edge
            edge -= self.pieces.blocks
        yield self.computed
