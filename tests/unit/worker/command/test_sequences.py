"""A sequence between its program and the steps."""

import numpy as np
import pytest

from pagewire.models import EMBEDDED, resolve_model
from pagewire.worker.command.backend import given_sampling, unmet
from pagewire.worker.command.messages import Piece, Ready
from pagewire.worker.command.sequences import LiveSequence
from pagewire.worker.command.text import ProgramText
from pagewire.worker.errors import SetupError
from pagewire.worker.protocol.steps.step import Start, StepSampling

EOS, VOCAB = 2, 100


@pytest.fixture(scope="module")
def text() -> ProgramText:
    return ProgramText(resolve_model(EMBEDDED))


def start(*, generated=0, max_new=5, ends=(EOS,), **sampling) -> Start:
    none = np.empty(0, np.int32)
    return Start(
        slot=0,
        token_ids=np.arange(10, 14, dtype=np.int32),
        num_generated=generated,
        num_computed=0,
        blocks=none,
        sampling=StepSampling(**sampling),
        max_new_tokens=max_new,
        end_token_ids=ends,
    )


def live(vocab_size=VOCAB, **given) -> LiveSequence:
    return LiveSequence.of("1", start(**given), EOS, vocab_size)


def test_tokens_come_in_order():
    sequence = live()
    assert not sequence.answerable
    sequence.receive(Piece("1", (5, 6)), None)
    sequence.receive(Piece("1", (7,)), None)
    assert [sequence.take() for _ in range(3)] == [5, 6, 7]
    assert not sequence.answerable


def test_an_end_is_the_end_of_sequence_token():
    sequence = live()
    sequence.receive(Piece("1", (5,), finished=True), None)
    assert [sequence.take() for _ in range(3)] == [5, EOS, EOS]  # steps run ahead of the end
    sequence.receive(Piece("1", (6,)), None)
    assert sequence.take() == EOS


def test_more_than_max_tokens_is_dropped():
    sequence = live(max_new=2)
    sequence.receive(Piece("1", (5, 6, 7, 8), finished=True), None)
    assert [sequence.take(), sequence.take()] == [5, 6]
    assert (sequence.failure, len(sequence.tokens)) == (None, 0)
    assert sequence.answerable  # no step waits for more


@pytest.mark.parametrize("end", [EOS, 7])
def test_a_token_that_ends_the_output_is_its_end(end):
    sequence = live(ends=(EOS, 7))
    sequence.receive(Piece("1", (5, end, 8)), None)
    assert [sequence.take(), sequence.take()] == [5, end]
    assert sequence.answerable  # a program that stops there blocks no step
    sequence.take()
    assert sequence.failure is None


def test_before_min_tokens_it_is_a_token_like_others():
    sequence = live(ends=(EOS,), min_tokens=3, generated=1)
    sequence.receive(Piece("1", (EOS, EOS, EOS, 5)), None)
    assert list(sequence.tokens) == [EOS, EOS, EOS]
    assert sequence.ended


@pytest.mark.parametrize(
    ("given", "piece", "message", "field"),
    [
        ({"ends": ()}, Piece("1", finished=True), "ignore_eos", "ignore_eos"),
        ({"min_tokens": 3, "generated": 1}, Piece("1", (5,), finished=True), "min_tokens",
         "min_tokens"),
        ({}, Piece("1", (5, VOCAB)), "above 99", ""),
        ({}, Piece("1", text="a"), "had not announced", ""),
        ({}, Piece("1", error="too hard"), "too hard", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_used_fails_the_sequence(given, piece, message, field):
    sequence = live(**given)
    sequence.receive(piece, None)
    assert message in sequence.failure.message
    assert (sequence.failure.field, sequence.failure.retryable) == (field, False)
    sequence.receive(Piece("1", (7,)), None)
    assert 7 not in sequence.tokens


def test_tokens_before_a_failure_count_as_an_end_after_enough_tokens():
    sequence = live(min_tokens=3, generated=1)
    sequence.receive(Piece("1", (5, 6), finished=True), None)
    assert [sequence.take() for _ in range(3)] == [5, 6, EOS]


def test_text_becomes_tokens(text):
    sequence = live(vocab_size=10**6, max_new=100)
    pieces = ["Once", " upon a time", "\n", " é🙂", "<|im_end|>"]
    for piece in pieces:
        sequence.receive(Piece("1", text=piece), text)
    assert sequence.failure is None
    assert text.decode(list(sequence.tokens)) == "".join(pieces)
    assert EOS not in sequence.tokens  # the letters of the name, not the token
    sequence.receive(Piece("1", text="\ud83d"), text)
    assert "no token ids" in sequence.failure.message


def test_text_needs_a_byte_level_tokenizer(text, tmp_path):
    text.check_pieces()
    with pytest.raises(SetupError, match=r"no tokenizer\.json"):
        ProgramText(tmp_path)


def test_only_what_differs_from_neutral_is_given():
    assert given_sampling(StepSampling()) == {}
    sampling = StepSampling(
        top_k=4,
        temperature=0.0,
        min_tokens=2,
        bias_ids=np.array([7], np.int32),
        biases=np.array([-1.5], np.float32),
    )
    assert given_sampling(sampling) == {
        "top_k": 4,
        "temperature": 0.0,
        "min_tokens": 2,
        "logit_bias": {"7": -1.5},
    }


def test_what_a_program_does_not_honour_is_refused():
    ready, defaults = Ready(honours=frozenset({"temperature"})), {"top_p": 0.95}

    def refused(**sampling):
        each = start(**sampling)
        failure = unmet(given_sampling(each.sampling), each, ready, defaults)
        return failure and failure.field

    assert refused(temperature=0.5) is None
    assert refused(top_p=0.95) is None  # the model's default, not requested
    assert refused(top_p=0.9) == "top_p"
    assert refused(logprobs=0) == "logprobs"
    assert refused(min_tokens=1) == "min_tokens"
    assert refused(presence_penalty=1.0) == "presence_penalty"
