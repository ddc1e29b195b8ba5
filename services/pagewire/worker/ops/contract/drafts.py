"""The first and the last operations of a decode step whose rows may be drafts.

A sequence has one row or several in such a step. The first row computes the sequence's last token.
The other rows compute drafts of the next tokens, one position each. `TokenHistory` has the data
that the host does not have yet when it queues the step: positions, drafts, and the tokens that
drafts come from. These tokens are the sequence's own, its prediction (the client's guess of the
whole output), and recent outputs of the same cache salt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire.worker.ops.contract.sampling import Adjustments

# Rows of the packed inputs of a decode step, each `[rows]` int32; see `begin_drafted`. Writes of
# the block tables follow, as in the inputs of `begin_decode`.
SLOTS, PLACES, OFFSETS = range(3)

# Rows of the result of a step, each `[rows]` int32; see `end_drafted`.
TOKENS, COUNTS, DRAFTED, RIGHT, DRAFTERS = range(5)
NUM_RESULTS = 5

# The source of drafts: the sequence's own tokens, its prediction, a draft model, or recent
# outputs. The draft model drafts only where no other source does.
SUFFIX, PREDICTION, MODEL, RECENT = range(4)

# Columns of `TokenHistory.predictions`.
PREDICTED, REACHED, EDIT, RUN = range(4)
OUT_OF_STEP = -1  # as REACHED

# At most this many tokens at the end of a sequence are compared with earlier ones.
LONGEST_MATCH = 24
# This many equal tokens in a row find the place in a prediction. One is enough up to `NEAR_EDIT`
# tokens after an edit.
SURE_MATCH = 3
NEAR_EDIT = 12
# A prediction has fewer tokens than this.
MAX_PREDICTED = 1 << 24

# The token of a sequence that already had all its tokens. FAILED is -1.
ENDED = -2


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of all sequences, and drafts of their next ones. All int32, one row a slot.

    The last slot is padding: its limit is 0, so steps compute none of its rows.

    Attributes:
        rows: `[slots, first + length]`. The known tokens are in column `first`, for position 0, to
            column `first + positions`. The prediction is at the end of the row, until the known
            tokens need the place.
        positions: `[slots]`, the position of the last known token, which the next step computes.
        limits: `[slots]`, the position of the last token that the sequence may get.
        drafts: `[slots, most]`, the drafts of the next tokens.
        num_drafts: `[slots]`, the number of drafts.
        drafters: `[slots]`, the source of the drafts.
        predictions: `[slots, 4]`: the number of tokens of the prediction, 0 for none; the place of
            the output's next token in it, or OUT_OF_STEP; the place where the output last left it;
            and the number of right tokens in a row before the place of the next one.
        num_recent: `[slots]`, the number of columns with recent outputs, directly before column
            `first`. A negative token follows each output, and is in column `first - 1`.
        first: a multiple of 4, so that the known tokens are aligned.
        min_match: at least this many of the last tokens must have occurred before. With fewer,
            there are no drafts from them.
    """

    rows: Tensor
    positions: Tensor
    limits: Tensor
    drafts: Tensor
    num_drafts: Tensor
    drafters: Tensor
    predictions: Tensor
    num_recent: Tensor
    first: int
    min_match: int = 1

    @property
    def tokens(self) -> Tensor:
        """The rows from position 0 on, `[slots, length]`."""
        return self.rows[:, self.first :]

    def locate(self, slots: Tensor, places: Tensor, offsets: Tensor) -> LocatedRows:
        """Return where rows are, as `begin_drafted` does; for steps that begin in another way.

        Args:
            slots, places, offsets: `[rows]` int32, as in the inputs of `begin_drafted`.
        """
        positions = self.positions[slots] + places
        computed = (positions < self.limits[slots]) & (places <= self.num_drafts[slots])
        return LocatedRows(
            slots=torch.where(computed, slots, len(self.positions) - 1),
            positions=positions * computed,
            lengths=(positions + 1) * computed,
            indices=(positions + offsets) * computed,
        )


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Where the rows of a step are, each `[rows]` int32.

    A row without a token to compute is a padding row: of the padding slot, with length 0.
    """

    slots: Tensor
    positions: Tensor
    lengths: Tensor  # KV tokens, that of the row included
    indices: Tensor  # of the drawn token in its request's output


class DraftOps(Protocol):
    """The operations before the first and after the last layer of a decode step with drafts."""

    def begin_drafted(
        self, inputs: Tensor, embedding: Tensor, history: TokenHistory, block_tables: Tensor
    ) -> tuple[Tensor, LocatedRows]:
        """Append blocks to block tables, place the rows and embed their tokens.

        The row of place 0 computes the last token of its sequence, if the sequence may get another
        token. The row of place `i` computes draft `i - 1`, `i` positions later, if there is such a
        draft and the sequence may also get the token after it.

        Args:
            inputs: `[6, rows]` int32: the slot of each row, its place among the rows of its
                sequence, and its offset, which is the index of its token in the output minus its
                position; then slot, column and block of a block table write for each row, as in
                `begin_decode`.
            embedding: `[vocabulary, hidden]`.
            history: read.
            block_tables: `[slots, max_blocks]` int32, written in place. The last slot is padding.

        Returns:
            The residual stream `[rows, hidden]`, and the rows.
        """

    def end_drafted(
        self,
        tokens: Tensor,
        hidden: Tensor,
        slots: Tensor,
        places: Tensor,
        history: TokenHistory,
        last_tokens: Tensor,
        adjustments: Adjustments | None = None,
    ) -> Tensor:
        """Keep the tokens of each sequence and draft its next ones.

        A sequence gets the token of its first row. It also gets the token of each following row, as
        long as the row's draft is the token drawn before it and its `hidden` is finite.

        If the output is in step with the prediction, the drafts are the prediction's next tokens.
        After an edit the output is in step again at the place after the longest match of its last
        tokens. A match has SURE_MATCH tokens or more; one token is enough if the place is 1 to
        NEAR_EDIT tokens after the place of the edit. Of equally long matches, the first one after
        the place of the edit counts, or else the last one.

        Otherwise the drafts are the tokens that followed an earlier occurrence of the last tokens:
        the longest one, and the latest of equally long ones. At most LONGEST_MATCH tokens are
        compared. If fewer than `history.min_match` are equal, there are no drafts. Recent outputs
        count as earlier than the known tokens. An occurrence at the end of an output does not
        count. If fewer than `most` known tokens followed, they repeat. Drafts from a recent output
        end with that output.

        Args:
            tokens: `[rows]` int32, as drawn.
            hidden: `[rows, hidden]`, the residual stream that the logits were computed from.
            slots: `[rows]` int32 of `LocatedRows`. Rows of a sequence are neighbours.
            places: `[rows]` int32, as in the inputs of `begin_drafted`.
            history: written in place.
            last_tokens: `[slots]` int32, written in place. A failed row leaves token 0.
            adjustments: by slot; the first token of each sequence with penalties is added to its
                counts. Such a sequence has one row. None promises that no row has penalties.

        Returns:
            `[5, rows]` int32. All rows have the token. Rows of place 0 also have the number of
            tokens that the sequence got, 1 if it failed or had ended; the number of its drafts
            that were computed; whether its first draft, computed or not, was its next token; and
            the source of these drafts. A row of place 0 has the token FAILED if `hidden` is not
            finite, and ENDED if the row was not computed.
        """
