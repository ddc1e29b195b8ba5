"""Runs of tokens: the tokens of each row of a step, from a worker that speculates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array, unpack
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.slot_table import SlotArray
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.v1 import worker_pb2 as worker_pb

LAST_DRAFTER = max(worker_pb.Drafter.values())


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """The rows of a result that had drafts, `[n]`."""

    rows: Int32Array  # ascending
    drafters: Int32Array
    drafted: Int32Array
    accepted: Int32Array

    @classmethod
    def read(cls, result: worker_pb.StepResult, counts: Int32Array, most: int) -> "RowDrafts":
        """The drafts of a result with `counts [rows]` tokens; ValueError if they are invalid.

        A row has at most `most` drafts.
        """
        rows, drafted = unpack(result.draft_rows), unpack(result.draft_counts)
        drafters = unpack(result.drafters)
        if not len(rows) == len(drafted) == len(drafters):
            raise ValueError(
                f"step {result.step} has {len(rows)} rows with drafts, {len(drafted)} numbers of "
                f"drafts, and {len(drafters)} drafters"
            )
        if rows.min() < 0 or rows.max() >= len(counts):
            raise ValueError(f"step {result.step} has drafts of row {rows.max()} of {len(counts)}")
        accepted = counts[rows] - np.int32(1)
        wrong = ((accepted > drafted) | (drafted > most)).nonzero()[0]
        if len(wrong):
            i = wrong[0]
            raise ValueError(
                f"step {result.step} has {drafted[i]} drafts in row {rows[i]}, {accepted[i]} of "
                f"them right; a row has at most {most}"
            )
        if drafters.min() <= worker_pb.DRAFTER_UNSPECIFIED or drafters.max() > LAST_DRAFTER:
            raise ValueError(
                f"step {result.step} has the drafters {drafters.min()} to {drafters.max()}; known "
                f"are 1 to {LAST_DRAFTER}"
            )
        return cls(rows, drafters, drafted, accepted)

    @property
    def rejected(self) -> tuple[SlotArray, Int32Array]:
        """The rows that had wrong tokens of predictions, and how many each had."""
        wrong = self.drafted - self.accepted
        found = self._predicted & (wrong > 0)
        return self.rows[found].astype(np.intp), wrong[found]

    def predicted_at(self, place: int) -> SlotArray:
        """The rows whose token at a place was drafted from a prediction."""
        return self.rows[self._predicted & (self.accepted > place)].astype(np.intp)

    @property
    def _predicted(self) -> NDArray[np.bool_]:
        predicted: NDArray[np.bool_] = self.drafters == worker_pb.DRAFTER_PREDICTION
        return predicted


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of a result, one row after the other."""

    tokens: Int32Array  # [tokens]
    counts: Int32Array  # [rows], tokens of each, at least 1
    places: Int32Array  # [tokens], the place of each in its row, from 0
    logprobs: StepLogprobs | None
    drafts: RowDrafts | None  # None: no row had any

    @classmethod
    def read(
        cls, result: worker_pb.StepResult, logprobs: StepLogprobs | None, most: int
    ) -> "TokenRuns":
        """The runs of a result that has counts.

        ValueError if a row does not have 1 to `most` tokens, or the counts do not add up.
        """
        tokens, counts = unpack(result.token_ids), unpack(result.token_counts)
        if counts.min() < 1 or counts.max() > most or counts.sum() != len(tokens):
            raise ValueError(
                f"step {result.step} has {len(tokens)} tokens in rows of {counts.min()} to "
                f"{counts.max()}, {counts.sum()} together; a row has 1 to {most}"
            )
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.arange(len(tokens), dtype=np.int32) - begins.astype(np.int32)
        drafts = RowDrafts.read(result, counts, most - 1) if result.draft_rows else None
        return cls(tokens, counts, places, logprobs, drafts)

    @property
    def first(self) -> tuple[Int32Array, StepLogprobs | None]:
        """The first token of each row, and their log probabilities."""
        return self._at(0)

    def later(self) -> Iterator[tuple[int, SlotArray, Int32Array, StepLogprobs | None]]:
        """The second tokens, then the third, and so on: the place of each of them, from 1, then
        their rows, tokens, log probabilities."""
        for place in range(1, int(self.counts.max())):
            yield place, (self.counts > place).nonzero()[0], *self._at(place)

    def note_predicted(self, batch: WorkerBatch, place: int) -> None:
        """Counts tokens of predictions, after those at a place were committed."""
        if self.drafts is None:
            return
        if place == 0:
            batch.note_rejected(*self.drafts.rejected)
        batch.note_accepted(self.drafts.predicted_at(place))

    def _at(self, place: int) -> tuple[Int32Array, StepLogprobs | None]:
        here = self.places == place
        logprobs = None if self.logprobs is None else self.logprobs.of(here)
        return self.tokens[here], logprobs
