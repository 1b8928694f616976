"""Static buffers of a runner: where a step's metadata lies on the device, and its staging on the host.

The device has one copy, which kernels (and captured graphs) read in the order of their queue. The host has one staging
a step that may be in flight, and a staging is filled again only when the step that used it has ended.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.engine.passes import DecodeTensors
from engine_adapter.engine.streams import Event, Queue

__all__ = ["Staging", "StepBuffers"]

_COLUMNS = 5  # token, source, context, sequence, position
_CONTEXTS = 2


class Staging:
    """Host memory of one step. `rows` `[5, max_rows]`: see `StepBuffers`; `tables` and `chosen` are flat."""

    def __init__(self, queue: Queue, *, max_rows: int, table_size: int) -> None:
        self.rows = queue.staging(_COLUMNS * max_rows).view(_COLUMNS, max_rows)
        self.tables = queue.staging(table_size)
        self.table_rows = queue.staging(max_rows)
        self.chosen = queue.staging(max_rows)
        self.event: Event | None = None

    def contexts(self, size: int) -> NDArray[np.int32]:
        """Those of the first `size` rows, shared."""
        contexts: NDArray[np.int32] = self.rows[_CONTEXTS, :size].numpy()
        return contexts

    def wait(self) -> None:
        """Returns when the step that used it last has ended."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class StepBuffers:
    """For up to `max_running` sequences and `max_pages` pages a sequence.

    `token_ids` are the rows' tokens, or where `sources` is not negative, that entry of `chosen`: the tokens that the
    step before chose, one a sampling chunk. All int32 on the device, `[max_running]`.
    """

    def __init__(
        self, queue: Queue, device: torch.device, *, max_running: int, max_pages: int, depth: int
    ) -> None:
        """`depth`: steps that may be in flight while another one is launched."""
        self._queue = queue
        self._stagings = [
            Staging(queue, max_rows=max_running, table_size=max_running * max_pages) for _ in range(depth + 1)
        ]
        self._turn = 0
        self.max_pages = max_pages
        fields = torch.zeros((_COLUMNS, max_running), dtype=torch.int32, device=device)
        self._fields = fields
        self.token_ids, self.sources, context_lens, seq_of_row, positions = fields.unbind()
        self.chosen = torch.zeros(max_running, dtype=torch.int32, device=device)
        ends = torch.arange(max_running + 1, dtype=torch.int32, device=device)
        self.decode = DecodeTensors(
            block_tables=torch.zeros((max_running, max_pages), dtype=torch.int32, device=device),
            rows=torch.stack((ends[:-1], ends[1:]), dim=1).contiguous(),
            context_lens=context_lens,
            seq_of_row=seq_of_row,
            positions=positions,
        )
        self._packed = torch.zeros(max_running * max_pages, dtype=torch.int32, device=device)
        self._packed_rows = torch.zeros(max_running, dtype=torch.int32, device=device)
        self._sent: list[object] = [None] * max_running  # per row, whose block table is on the device

    def next_staging(self) -> Staging:
        """A staging that no step in flight uses."""
        self._turn = (self._turn + 1) % len(self._stagings)
        staging = self._stagings[self._turn]
        staging.wait()
        return staging

    def clear_rows(self) -> None:
        """Make every row on the device a padding row."""
        self._fields.zero_()
        self.sources.fill_(-1)
        self.decode.seq_of_row.fill_(-1)

    def rehearse(self) -> None:
        """Send padding rows and fetch nothing of use, so that no step waits for what copies them to be compiled."""
        staging = self.next_staging()
        self.clear_rows()
        self._queue.copy(staging.rows, self._fields)
        self.send_rows(staging)
        self.fetch_chosen(staging, 1)

    def send_rows(self, staging: Staging) -> None:
        """Queue the copy of all row fields."""
        self._queue.copy(self._fields, staging.rows)

    def send_tables(self, staging: Staging, tables: list[NDArray[np.int32]], versions: list[object]) -> None:
        """Queue the copy of those block tables whose `versions` differ from what was sent for that row before."""
        changed = [row for row, version in enumerate(versions) if self._sent[row] != version]
        if not changed:
            return
        width = max(len(tables[row]) for row in changed)
        size = len(changed) * width
        packed = staging.tables.numpy()[:size].reshape(len(changed), width)
        for line, row in zip(packed, changed, strict=True):
            line[: len(tables[row])] = tables[row]
            self._sent[row] = versions[row]
        staging.table_rows.numpy()[: len(changed)] = changed
        there, rows = self._packed[:size], self._packed_rows[: len(changed)]
        self._queue.copy(there, staging.tables[:size])
        self._queue.copy(rows, staging.table_rows[: len(changed)])
        self.decode.block_tables[:, :width].index_copy_(0, rows.long(), there.view(len(changed), width))

    def fetch_chosen(self, staging: Staging, count: int) -> None:
        """Queue the copy of the first `count` chosen tokens to the host."""
        self._queue.copy(staging.chosen[:count], self.chosen[:count])
