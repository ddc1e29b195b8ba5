"""Beam search of one request: in each round every beam is a sequence that computes one token."""

from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pagewire.errors import invalid
from pagewire.limits import MAX_CHOICES, MAX_LOGPROBS
from pagewire.packing import Float32Array, Int32Array
from pagewire.scheduler.core.beam_search import (
    Beam,
    BeamParams,
    BeamSearch,
    Hypothesis,
    num_candidates,
)
from pagewire.scheduler.core.sequence import Sampling, Sequence
from pagewire.scheduler.structured.constraint import constraining_field
from pagewire.v1 import inference_pb2 as pb

# Renders tokens as text.
Decode = Callable[[tuple[int, ...]], str]

# A length to this power is well within the range of a float.
MAX_PENALTY = 10.0
# The fields that a search does not use, and their values without an effect.
_NEUTRAL = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
_GREEDY = Sampling(temperature=0.0, seed=0, min_tokens=0)


def reserved_arrivals(width: int) -> int:
    """The arrival numbers that a search needs: at most two rounds of sequences exist at once."""
    return 2 * width


class BeamRequest:
    """The sequences of one search.

    A beam that continues is a new sequence. It shares the full KV blocks of the old sequence
    through the prefix cache and copies the last block, so that it computes one token. If a worker
    is lost, its beams of the current round run again.
    """

    def __init__(
        self, search: BeamSearch, origin: Sequence, num_returned: int, vocab_size: int
    ) -> None:
        """`origin` is the sequence of a request without a search; it must have no output yet."""
        self.sequences: list[Sequence] = []
        self._search = search
        self._origin = origin
        self._num_returned = num_returned
        top = min(search.num_candidates, vocab_size)
        self._sampling = replace(_GREEDY, logprobs=top)
        self._answers: dict[int, tuple[Int32Array, Float32Array]] = {}
        self._rounds = 0
        self._ended: list[Sequence] = []
        self._cached_tokens: int | None = None
        self._start_round()

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._search.done

    def answer(self, sequence: Sequence, ids: Int32Array, logprobs: Float32Array) -> bool:
        """Takes the likeliest next tokens `[candidates]` of a beam; True once the round is over."""
        if self._cached_tokens is None:
            self._cached_tokens = sequence.cached_tokens
        top = self._sampling.logprobs
        assert len(ids) >= (top or 0)
        self._answers[sequence.arrival] = (ids[:top], logprobs[:top])
        return len(self._answers) == len(self.sequences)

    def next_round(self) -> list[Sequence]:
        """Ends a round; returns the sequences whose KV no beam needs any more."""
        answers = [self._answers.pop(sequence.arrival) for sequence in self.sequences]
        self._search.advance(
            np.stack([ids for ids, _ in answers]), np.stack([values for _, values in answers])
        )
        unneeded, self._ended = self._ended, self.sequences
        self._start_round()
        return unneeded

    def close(self) -> list[Sequence]:
        """All sequences whose KV may be kept."""
        return [*self._ended, *self.sequences]

    def finish(self, decode: Decode | None, include_stop_token: bool) -> pb.Finish:
        """The best outputs; without text if `decode` is None."""
        returned = self._search.finished[: self._num_returned]
        outputs = [_encode(output, decode, include_stop_token) for output in returned]
        stopped = any(output.reason == pb.FINISH_REASON_STOP for output in outputs)
        return pb.Finish(
            reason=pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH,
            hypotheses=outputs,
        )

    def usage(self) -> pb.Usage:
        """Tokens of the prompt and of the returned outputs, or of as many beams until then."""
        outputs = self._search.finished if self.done else self._search.running
        returned = outputs[: self._num_returned]
        return pb.Usage(
            prompt_tokens=len(self._origin.prompt),
            completion_tokens=sum(len(output.tokens) for output in returned),
            cached_tokens=self._cached_tokens or 0,
        )

    def _start_round(self) -> None:
        first = self._origin.arrival + 1 + self._rounds % 2 * self._search.width
        self.sequences = [
            self._sequence(beam, first + i) for i, beam in enumerate(self._search.running)
        ]
        self._rounds += 1

    def _sequence(self, beam: Beam, arrival: int) -> Sequence:
        return replace(
            self._origin,
            sampling=self._sampling,
            max_tokens=len(beam.tokens) + 1,
            stop_ids=(),
            arrival=arrival,
            output=array("i", beam.tokens),
            blocks=[],
        )


def check_beam_search(message: pb.GenerateRequest, num_stop_ids: int) -> None:
    """Raises RequestError for a search that cannot be run."""
    asked = message.beam_search
    if not 1 <= asked.width <= MAX_CHOICES:
        raise invalid("width", f"width is {asked.width}; it must be between 1 and {MAX_CHOICES}")
    if asked.num_returned > asked.width:
        raise invalid(
            "num_returned",
            f"num_returned is {asked.num_returned}, the width {asked.width}; lower num_returned",
        )
    if not -MAX_PENALTY <= asked.length_penalty <= MAX_PENALTY:  # False for NaN
        raise invalid(
            "length_penalty",
            f"length_penalty is {asked.length_penalty:g}; it must be between -{MAX_PENALTY:g} and "
            f"{MAX_PENALTY:g}",
        )
    if num_candidates(asked.width, num_stop_ids) > MAX_LOGPROBS:
        raise invalid(
            "stop_token_ids",
            f"{asked.width} beams and {num_stop_ids} stop tokens, the model's own included, are "
            f"more than {MAX_LOGPROBS}; lower the width or give fewer stop tokens",
        )
    for name, neutral in _NEUTRAL.items():
        if message.sampling.HasField(name) and getattr(message.sampling, name) != neutral:
            raise invalid(name, f"a beam search draws nothing; leave {name} out or at {neutral}")
    for name, given in (
        ("stop", len(message.stop.stop) > 0),
        ("logit_bias", len(message.sampling.logit_bias) > 0),
        ("logprobs", message.HasField("logprobs")),
        ("prompt_logprobs", message.HasField("prompt_logprobs")),
        ("prompt_text", message.prompt_text),
        ("resume_token_ids", len(message.resume_token_ids) > 0),
        (field := constraining_field(message), bool(field)),
    ):
        if given:
            raise invalid(name, f"{name} cannot be used with beam search; remove it")


def begin_search(asked: pb.BeamSearch, origin: Sequence, vocab_size: int) -> BeamRequest:
    """The search that `asked` describes, which must have been checked, from a plain sequence."""
    params = BeamParams(
        width=asked.width,
        length_penalty=asked.length_penalty if asked.HasField("length_penalty") else 1.0,
        early_stopping=asked.early_stopping,
    )
    search = BeamSearch(params, origin.max_tokens, origin.sampling.min_tokens, origin.stop_ids)
    return BeamRequest(search, origin, asked.num_returned or asked.width, vocab_size)


def _encode(output: Hypothesis, decode: Decode | None, include_stop_token: bool) -> pb.Hypothesis:
    shown = output.tokens[:-1] if output.stopped and not include_stop_token else output.tokens
    return pb.Hypothesis(
        token_ids=output.tokens,
        text=decode(shown) if decode is not None else "",
        score=output.score,
        reason=pb.FINISH_REASON_STOP if output.stopped else pb.FINISH_REASON_LENGTH,
        stop_token_id=output.tokens[-1] if output.stopped else None,
    )
