"""Runs of tokens: what each row of a step got from a worker that speculates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagewire.packing import Int32Array, unpack
from pagewire.scheduler.core.batching.slot_table import SlotArray
from pagewire.scheduler.requests.step_logprobs import StepLogprobs
from pagewire.v1 import worker_pb2 as worker_pb


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of a result, one row after the other."""

    tokens: Int32Array  # [tokens]
    counts: Int32Array  # [rows], tokens of each, at least 1
    places: Int32Array  # [tokens], the place of each in its row, from 0
    logprobs: StepLogprobs | None

    @classmethod
    def read(
        cls, result: worker_pb.StepResult, logprobs: StepLogprobs | None, most: int
    ) -> "TokenRuns":
        """Those of a result that has counts.

        ValueError if a row has not 1 to `most` tokens, or they do not add up.
        """
        tokens, counts = unpack(result.token_ids), unpack(result.token_counts)
        if counts.min() < 1 or counts.max() > most or counts.sum() != len(tokens):
            raise ValueError(
                f"step {result.step} has {len(tokens)} tokens in rows of {counts.min()} to "
                f"{counts.max()}, {counts.sum()} together; a row has 1 to {most}"
            )
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.arange(len(tokens), dtype=np.int32) - begins.astype(np.int32)
        return cls(tokens, counts, places, logprobs)

    @property
    def first(self) -> tuple[Int32Array, StepLogprobs | None]:
        """The first token of each row, and their log probabilities."""
        return self._at(0)

    def later(self) -> Iterator[tuple[SlotArray, Int32Array, StepLogprobs | None]]:
        """The second tokens, then the third, and so on: their rows, tokens, log probabilities."""
        for place in range(1, int(self.counts.max())):
            yield (self.counts > place).nonzero()[0], *self._at(place)

    def _at(self, place: int) -> tuple[Int32Array, StepLogprobs | None]:
        here = self.places == place
        logprobs = None if self.logprobs is None else self.logprobs.of(here)
        return self.tokens[here], logprobs
