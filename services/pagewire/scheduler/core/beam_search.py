"""Beam search over one prompt: which beams continue, which outputs are complete, when it ends.

The algorithm is that of transformers' `generate(num_beams=width)`. Among the continuations of all
running beams, the best `width` that do not end become the running beams. A continuation that ends
is kept if it is among the best `width` continuations and among the best `width` outputs so far. The
score of an output is the sum of its log probabilities, divided by its length to the power of
`length_penalty`.
"""

from dataclasses import dataclass

import numpy as np

from pagewire.packing import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class BeamParams:
    """`width` is the number of running beams, and of complete outputs.

    With `early_stopping` the search ends at `width` complete outputs. Otherwise it continues while
    the best running beam, if it ended now, would have a better score than the worst of them.
    """

    width: int
    length_penalty: float
    early_stopping: bool


@dataclass(frozen=True, slots=True)
class Beam:
    """A running output, and the sum of its log probabilities."""

    tokens: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete output: `stopped` by its last token, or else ended by length."""

    tokens: tuple[int, ...]
    score: float
    stopped: bool


class BeamSearch:
    """A search in rounds: each round continues every running beam by one token.

    Invariants: all running beams have the same length. `finished` is sorted by score, best first,
    and has at most `width` outputs; it has exactly `width` once the search is `done`.
    """

    __slots__ = (
        "_max_tokens",
        "_min_tokens",
        "_params",
        "_stop_ids",
        "done",
        "finished",
        "running",
    )

    def __init__(
        self, params: BeamParams, max_tokens: int, min_tokens: int, stop_ids: tuple[int, ...]
    ) -> None:
        """`stop_ids` end an output, but not among its first `min_tokens`."""
        self.running = [Beam((), 0.0)]
        self.finished: list[Hypothesis] = []
        self.done = False
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_ids = frozenset(stop_ids)

    @property
    def width(self) -> int:
        """The most beams that run at once."""
        return self._params.width

    @property
    def num_candidates(self) -> int:
        """The number of likeliest next tokens that a round needs for each beam."""
        return num_candidates(self._params.width, len(self._stop_ids))

    def advance(self, ids: Int32Array, logprobs: Float32Array) -> list[int]:
        """Ends a round; returns for each new running beam the index of the beam it continues.

        `ids` and `logprobs` `[running, candidates]` are the likeliest next tokens of each running
        beam: at least `num_candidates`, or the whole vocabulary.
        """
        length = len(self.running[0].tokens) + 1
        before = np.array([beam.logprob for beam in self.running])
        sums = (before[:, None] + logprobs).ravel()
        origins: list[int] = []
        running: list[Beam] = []
        rank = 0
        for place in np.argsort(-sums, kind="stable").tolist():
            origin, column = divmod(place, ids.shape[1])
            token = int(ids[origin, column])
            stopped = token in self._stop_ids
            if stopped and length <= self._min_tokens:
                continue
            tokens = (*self.running[origin].tokens, token)
            if stopped or length == self._max_tokens:
                if rank < self._params.width:
                    score = float(sums[place]) / _norm(length, self._params)
                    self._finish(Hypothesis(tokens, score, stopped))
            else:
                running.append(Beam(tokens, float(sums[place])))
                origins.append(origin)
            rank += 1
            if len(running) == self._params.width:
                break
        self.running = running
        self.done = not self._can_improve(length)
        return origins

    def _finish(self, hypothesis: Hypothesis) -> None:
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self._params.width :]

    def _can_improve(self, length: int) -> bool:
        if not self.running:
            return False
        if len(self.finished) < self._params.width:
            return True
        if self._params.early_stopping:
            return False
        best = self.running[0].logprob / _norm(length, self._params)
        return best > self.finished[-1].score


def _norm(length: int, params: BeamParams) -> float:
    return float(length**params.length_penalty)


def num_candidates(width: int, num_stop_ids: int) -> int:
    """The number of a beam's likeliest next tokens that are enough for a round.

    At most `width` of them continue, and those that end are stop tokens.
    """
    return width + num_stop_ids
