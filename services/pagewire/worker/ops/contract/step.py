"""Changes of slots, and the first and the last operations of a decode step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.limits import MAX_STOP_IDS
from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState

# Columns of the values of a start, of 4 bytes each; see `start_slots`. The seed has two columns,
# and the stop token ids have the last ones.
START_SLOT, START_SEED, START_MIN_TOKENS, START_KINDS = 0, 1, 3, 4
START_TEMPERATURE, START_TOP_K, START_TOP_P, START_MIN_P, START_STOPS = range(5, 10)
START_VALUES = START_STOPS + MAX_STOP_IDS
# Columns of a write to a block table; see `write_tables`.
TABLE_SLOT, TABLE_COLUMN, TABLE_BLOCK = range(3)
TABLE_VALUES = 3

# Rows of the packed inputs of a decode step, each `[rows]` int32; see `begin_decode`.
SLOTS, POSITIONS, INDICES, WRITE_SLOTS, WRITE_COLUMNS, WRITE_BLOCKS = range(6)
NUM_INPUTS = 6

# The token of a row whose hidden state is not finite.
FAILED = -1


class StepOps(Protocol):
    """The operations before the first layer of a step, and those after its last layer."""

    def start_slots(self, starts: Tensor, by_slot: SamplingState) -> None:
        """Store the sampling parameters of slots that get a new sequence.

        Args:
            starts: `[starts, START_VALUES]` int32, the bits of each value. Slots are distinct; a
                row of slot -1 is skipped.
            by_slot: the parameters of all slots, written in place. Of `adjustments`, only `kinds`
                is written; None promises that no sequence has any.
        """

    def write_tables(self, writes: Tensor, block_tables: Tensor) -> None:
        """Store entries of block tables.

        Args:
            writes: `[writes, 3]` int32: slot, column and block. A row of slot -1 is skipped.
            block_tables: `[slots, max_blocks]` int32, written in place.
        """

    def begin_decode(
        self, inputs: Tensor, embedding: Tensor, last_tokens: Tensor, block_tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append blocks to block tables and embed the last token of each row.

        Args:
            inputs: `[6, rows]` int32: slot, position and output index of each row, then slot,
                column and block of a block table write for each row. A row without a write has the
                padding slot, column 0 and block 0.
            embedding: `[vocabulary, hidden]`.
            last_tokens: `[slots]` int32, the token that was last drawn for each slot.
            block_tables: `[slots, max_blocks]` int32, written in place. The last slot is padding.

        Returns:
            The residual stream `[rows, hidden]`, and KV lengths `[rows]` int32 that include the
            token of this step. Rows of the padding slot have length 0: they attend to nothing.
        """

    def gather_sampling(
        self, by_slot: SamplingState, slots: Tensor, indices: Tensor
    ) -> SamplingState:
        """Return the sampling parameters of some rows.

        Args:
            by_slot: the parameters of all slots; its `index` is not read.
            slots: `[rows]` int32.
            indices: `[rows]` int32, becomes `index` of the result.

        Returns:
            Tensors by row. In `adjustments` only `kinds` and `slots` are by row.
        """

    def end_decode(
        self,
        tokens: Tensor,
        hidden: Tensor,
        slots: Tensor,
        last_tokens: Tensor,
        adjustments: Adjustments | None = None,
    ) -> Tensor:
        """Keep the token of each row for the next step.

        Args:
            tokens: `[rows]` int32, as drawn.
            hidden: `[rows, hidden]`, the residual stream that the logits were computed from.
            slots: `[rows]` int32.
            last_tokens: `[slots]` int32, written in place. A failed row leaves token 0, which
                steps that are already queued may decode.
            adjustments: by slot; the tokens of rows with penalties are added to its counts, in
                place. None promises that no row has penalties.

        Returns:
            `[rows]` int32: the token, or FAILED where `hidden` is not finite.
        """
