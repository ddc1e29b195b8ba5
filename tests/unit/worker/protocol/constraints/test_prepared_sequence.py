"""Work ahead of tokens changes no mask: forced tokens, ends, and errors are as without it."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.bench.schemas import random_schema, wide_schema
from pagewire.grammars.dates import with_real_dates
from pagewire.models import eos_token_ids, resolve_model
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError, Grammars, grammars_of
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.prepared_sequence import MaskBuffer, PreparedSequence

FOLDER = resolve_model("embedded")
VOCAB = 4096
EOS = eos_token_ids(FOLDER)
NONE = np.empty(0, np.int32)
OPTIONS = {"whitespace_pattern": r" |\n {0,20}", "lenient": False, "coerce_one_of": False}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = grammars_of(FOLDER, VOCAB)
    assert found is not None
    return found


def begin(grammars: Grammars, constraint: Constraint) -> PreparedSequence:
    return PreparedSequence(MaskedSequence(constraint, grammars, NONE, NONE))


def masked(sequence: PreparedSequence) -> np.ndarray:
    mask = np.zeros(VOCAB // 32, np.int32)
    sequence.mask(MaskBuffer(mask))
    return mask


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammars: Grammars, constraint: Constraint, seed: int) -> int:
    """Compares a sometimes prepared sequence with an unprepared one; returns forced tokens."""
    draw, forced = random.Random(seed), 0
    plain, prepared = begin(grammars, constraint), begin(grammars, constraint)
    for _ in range(60):
        mask = masked(plain)
        np.testing.assert_array_equal(masked(prepared), mask)
        for _ in range(draw.choice((0, 1, 1, 2))):
            prepared.prepare(mask)
        assert prepared.index == plain.index
        assert not prepared.ended
        forced += len(tokens_of(mask)) == 1
        token = draw.choice(tokens_of(mask))
        plain.advance(token)
        prepared.advance(token)
        assert prepared.ended == plain.ended
        if plain.ended:
            break
    return forced


def test_masks_are_those_without_preparation(grammars: Grammars) -> None:
    schemas = [wide_schema(10), *(random_schema(seed) for seed in range(20))]
    forced = 0
    for seed, schema in enumerate(schemas):
        with_real_dates(schema)
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        forced += walk(grammars, Constraint(grammar, "", EOS), seed)
        forced += walk(grammars, Constraint(grammar, "", EOS, min_tokens=50), seed)
    assert forced > 50


def test_the_mask_behind_a_forced_token_is_known_before(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint(LLMatcher.grammar_from_regex("44"), "", EOS)
    plain, prepared = begin(grammars, constraint), begin(grammars, constraint)
    mask = masked(prepared)
    (forced,) = tokens_of(mask)
    prepared.prepare(mask)
    prepared.advance(forced)
    plain.advance(forced)
    expected = masked(plain)
    monkeypatch.delattr(PreparedSequence, "_compute")
    np.testing.assert_array_equal(masked(prepared), expected)


def test_forced_ends(grammars: Grammars) -> None:
    one = Constraint(LLMatcher.grammar_from_regex("[0-9]"), "", EOS[:1])
    sequence = begin(grammars, one)
    sequence.prepare(masked(sequence))
    (digit,) = grammars.tokenizer.tokenize_str("4")
    sequence.advance(digit)
    mask = masked(sequence)
    assert tokens_of(mask) == list(EOS[:1])
    sequence.prepare(mask)
    assert (sequence.index, sequence.ended) == (1, False)
    sequence.advance(EOS[0])
    assert (sequence.index, sequence.ended) == (2, True)


def test_another_token_than_the_forced_one_is_refused(grammars: Grammars) -> None:
    sequence = begin(grammars, Constraint(LLMatcher.grammar_from_regex("44"), "", EOS))
    mask = masked(sequence)
    (forced,), (letter,) = tokens_of(mask), grammars.tokenizer.tokenize_str("x")
    sequence.prepare(mask)
    with pytest.raises(GrammarError, match=f"token {letter} at index 0 of .*: {forced} must"):
        sequence.advance(letter)


def test_an_error_behind_a_forced_token_comes_with_that_token(grammars: Grammars) -> None:
    (four,) = grammars.tokenizer.tokenize_str("4")
    allowed = np.array([four], np.int32)  # and no 5
    grammar = LLMatcher.grammar_from_regex("4?45")
    sequence = begin(grammars, Constraint(grammar, "", EOS, allowed_token_ids=allowed))
    for index in range(2):
        mask = masked(sequence)
        assert tokens_of(mask) == [four]
        sequence.prepare(mask)
        assert (sequence.index, sequence.ended) == (index, False)
        if index == 0:
            sequence.advance(four)
    with pytest.raises(GrammarError, match="no token may come at index 2"):
        sequence.advance(four)
