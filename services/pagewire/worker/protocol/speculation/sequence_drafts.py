"""The drafts of one sequence, made by the first drafter that has any.

The order is: the tokens that the grammar forces, the client's prediction, the sequence's own
tokens, recent outputs of its salt, the draft model. There are two exceptions. Only the draft model
takes time; it comes before the sequence's own tokens and recent outputs if it is right often enough
to pay for that time. Another drafter's drafts replace those of the grammar if they begin with the
same tokens and are longer. All drafts of a row come from one drafter, and their results set the
number of its next drafts.
"""

from collections.abc import Sequence

import numpy as np

from pagewire.packing import Int32Array
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.speculation.draft_length import DraftLength
from pagewire.worker.protocol.speculation.prediction_drafter import PredictionDrafter
from pagewire.worker.protocol.speculation.recent_outputs import MATCH, RecentOutputs
from pagewire.worker.protocol.speculation.suffix_drafter import SuffixDrafter

# Output tokens that are added to the recent outputs together.
PUBLISHED = 64
# The part of the drafts that counts as right before the first results, for two drafters: clients
# predict what they expect, and forced text can be split into tokens in few ways.
LIKELY_RIGHT = 0.9

NO_DRAFTS = np.empty(0, np.int32)
# In place of a token that the device will draft.
FROM_DEVICE = -2
NO_DRAFTER = int(pb.DRAFTER_UNSPECIFIED)


class SequenceDrafts:
    """The drafters of one sequence. `drafter` made the latest drafts."""

    __slots__ = (
        "_grammar_length",
        "_model_cost",
        "_model_length",
        "_prediction",
        "_prediction_length",
        "_published",
        "_recent",
        "_recent_length",
        "_suffix",
        "_suffix_length",
        "drafter",
    )

    def __init__(
        self,
        known: Int32Array,
        num_prompt: int,
        prediction: Int32Array,
        recent: RecentOutputs,
        most: int,
        model_cost: float | None = None,
    ) -> None:
        """The drafters of a sequence that enters a slot.

        Args:
            known: `[n]`, the tokens of its prompt and of its output so far.
            num_prompt: the number of prompt tokens.
            prediction: `[m]`, the client's prediction; may be empty.
            recent: the recent outputs of its salt.
            most: the most drafts of a row.
            model_cost: see `Limits.draft_cost`; None without a draft model.
        """
        self.drafter = NO_DRAFTER
        self._suffix = SuffixDrafter(known)
        self._suffix_length = DraftLength(most)
        self._prediction: PredictionDrafter | None = None
        if len(prediction):
            self._prediction = PredictionDrafter(prediction, known[num_prompt:])
        self._prediction_length = DraftLength(most, LIKELY_RIGHT)
        self._grammar_length = DraftLength(most, LIKELY_RIGHT)
        self._recent = recent
        self._recent_length = DraftLength(most)
        self._model_cost = model_cost
        self._model_length = DraftLength(most, cost=model_cost or 0.0)
        # Known tokens before this place are published or belong to the prompt.
        self._published = num_prompt

    def draft(self, rows: int, most: int, forced: Sequence[int] = ()) -> Int32Array:
        """At most `most` tokens `[n]` that may come next, in a step of `rows` decode rows.

        `forced` are the tokens of the text that the grammar forces.
        """
        draft = self._unforced(rows, most)
        if forced and (length := self._grammar_length.next(rows)):
            tokens = np.array(forced[: max(0, min(length, most))], np.int32)
            agree = np.array_equal(draft[: len(tokens)], tokens)
            if not agree or len(draft) <= len(tokens):
                return self._made(pb.DRAFTER_GRAMMAR, tokens)
        return draft

    def _unforced(self, rows: int, most: int) -> Int32Array:
        """The drafts of all drafters but the grammar."""
        if self._prediction is not None and self._prediction.ready:
            length = self._prediction_length.next(rows)
            if length:
                tokens = self._prediction.draft(min(length, most))
                return self._made(pb.DRAFTER_PREDICTION, tokens)
        if self._is_worth_trying(self._suffix_length) and (
            length := self._suffix_length.next(rows)
        ):
            tokens = self._suffix.draft(min(length, most))
            if len(tokens):
                return self._made(pb.DRAFTER_SUFFIX, tokens)
        if self._is_worth_trying(self._recent_length) and (
            length := self._recent_length.next(rows)
        ):
            last = self._suffix.tokens[-MATCH:]
            if len(last) == MATCH:
                tokens = self._recent.draft(last, min(length, most))
                if len(tokens):
                    return self._made(pb.DRAFTER_RECENT, tokens)
        if self._model_cost is not None and (length := self._model_length.next(rows)):
            tokens = np.full(max(0, min(length, most)), FROM_DEVICE, np.int32)
            return self._made(pb.DRAFTER_DRAFT_MODEL, tokens)
        return NO_DRAFTS

    def _is_worth_trying(self, length: DraftLength) -> bool:
        """Whether a drafter that takes no time comes before the draft model."""
        cost = self._model_cost
        return cost is None or length.rate + cost >= self._model_length.rate

    def extend(self, tokens: Int32Array, drafted: int) -> None:
        """Adds tokens `[n]` of the output, of a step that had `drafted` drafts of the sequence."""
        if drafted:
            self._length_of(self.drafter).observe(drafted, len(tokens) - 1)
        self._suffix.extend(tokens)
        if self._prediction is not None:
            self._prediction.extend(tokens.tolist())
        if len(self._suffix.tokens) - self._published >= PUBLISHED:
            self.publish()

    def publish(self) -> None:
        """Adds the latest output tokens to the recent outputs."""
        known = self._suffix.tokens
        if len(known) > self._published:
            # With the `MATCH` tokens before them, so that a search can find the first new token.
            self._recent.add(known[max(0, self._published - MATCH) :])
            self._published = len(known)

    def _made(self, drafter: int, tokens: Int32Array) -> Int32Array:
        self.drafter = int(drafter)
        return tokens

    def _length_of(self, drafter: int) -> DraftLength:
        if drafter == pb.DRAFTER_GRAMMAR:
            return self._grammar_length
        if drafter == pb.DRAFTER_PREDICTION:
            return self._prediction_length
        if drafter == pb.DRAFTER_DRAFT_MODEL:
            return self._model_length
        return self._recent_length if drafter == pb.DRAFTER_RECENT else self._suffix_length
