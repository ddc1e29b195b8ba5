"""The first and the last operations of a decode step whose rows may be drafts.

A sequence has one row or several in such a step. The first computes its last token, the others
guesses of the tokens behind it, one position after the other. What the host does not know when it
queues the step is in `TokenHistory`: the positions, the guesses, and the tokens they come from.
These are the sequence's own tokens, its prediction, which is the client's guess of the whole
output, and recent outputs of the same cache salt.
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

# What guesses were made from: the sequence's own tokens, its prediction, a draft model, which
# guesses only where none of the others does, or recent outputs.
SUFFIX, PREDICTION, MODEL, RECENT = range(4)

# Columns of `TokenHistory.predictions`.
PREDICTED, REACHED, EDIT, RUN = range(4)
OUT_OF_STEP = -1  # as REACHED

# The most tokens at the end of a sequence that are compared with earlier ones.
LONGEST_MATCH = 24
# How many equal tokens in a row find the place in a prediction. Up to `NEAR_EDIT` tokens behind an
# edit one is enough.
SURE_MATCH = 3
NEAR_EDIT = 12
# A prediction has fewer tokens than this.
MAX_PREDICTED = 1 << 24

# The token of a sequence that has had all its tokens before. FAILED is -1.
ENDED = -2


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of all sequences, and guesses of their next ones. All int32, one row a slot.

    The last row is that of padding: its limit is 0, so it has no rows.

    Attributes:
        rows: `[slots, first + length]`. The known tokens begin at column `first` with that of
            position 0, and end with that of `positions`. The prediction is at the end of the row,
            until the sequence needs the place.
        positions: `[slots]`, the position of the last known token, which the next row computes.
        limits: `[slots]`, the position of the last token that the sequence may get.
        guesses: `[slots, most]`, the tokens that may come next.
        guessed: `[slots]`, how many guesses there are.
        drafters: `[slots]`, what they were made from.
        predictions: `[slots, 4]`: how many tokens the prediction has, 0 for none; the place in it
            of the next token of the output, or OUT_OF_STEP; the place at which the output left it
            last; and how many tokens before that of the next one were right without a gap.
        num_recent: `[slots]`, how many of the `first` columns hold recent outputs: the last ones.
            A negative token is behind each output, and in column `first - 1`.
        first: a multiple of 4, so that the known tokens are aligned.
        min_match: how many of the last tokens must have come before. With fewer, nothing is
            guessed from them.
    """

    rows: Tensor
    positions: Tensor
    limits: Tensor
    guesses: Tensor
    guessed: Tensor
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
        """Where rows are, as `begin_drafted` says; for steps that begin in another way.

        Args:
            slots, places, offsets: `[rows]` int32, as in the inputs of `begin_drafted`.
        """
        positions = self.positions[slots] + places
        computed = (positions < self.limits[slots]) & (places <= self.guessed[slots])
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

        The row of place 0 computes the last token of its sequence if it may get another one. The
        row of place `i` computes guess `i - 1` if there is one, at `i` positions behind, if the
        sequence may get the token after it, too.

        Args:
            inputs: `[6, rows]` int32: the slot of each row, its place among the rows of its
                sequence, and its offset, which is the index of its token in the output minus its
                position; then slot, column and block of as many block table writes, as in
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
        """Keep the tokens of each sequence and guess its next ones.

        A sequence gets the token of its first row, and that of each row whose guess is the token
        drawn before it and whose `hidden` is finite, up to the first row that is not so.

        The guesses are the next tokens of its prediction, if its output is in step with it. After
        an edit it is in step again behind the longest match of its last tokens with SURE_MATCH
        tokens or more, or else with one or more if the next place is 1 to NEAR_EDIT tokens behind
        the place of the edit. Of several it is the first one behind that place, or else the last.

        Otherwise the guesses are what followed the latest of the longest earlier occurrences of
        the last tokens, of which LONGEST_MATCH are compared; there are none if fewer than
        `history.min_match` are equal. Recent outputs count as earlier than the known tokens, and
        occurrences behind which an output ended do not count. If fewer than `most` known tokens
        followed, they repeat; of a recent output there are as many guesses as tokens followed.

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
            `[5, rows]` int32. For all rows the token. For those of place 0 the number of tokens
            that the sequence got, 1 for one that failed or had ended; the number of its guesses
            that were computed; whether its first guess, computed or not, was its next token; and
            what these guesses were made from. A row of place 0 has the token FAILED where `hidden`
            is not finite, and ENDED where it was not computed.
        """
