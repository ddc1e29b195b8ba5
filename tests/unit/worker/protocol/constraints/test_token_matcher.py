"""The short path through strings yields the masks of one matcher of all tokens."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.bench.schemas import random_schema, wide_schema
from pagewire.grammars.dates import with_real_dates
from pagewire.models import resolve_model
from pagewire.worker.protocol.constraints.grammars import Grammars, compile_grammar, grammars_of
from pagewire.worker.protocol.constraints.plain_strings import probe_of
from pagewire.worker.protocol.constraints.string_tokens import (
    ESCAPED,
    INSIDE,
    OUTSIDE,
    StringTokens,
)

VOCAB = 4096
OPTIONS = {"whitespace_pattern": r" |\n {0,20}", "lenient": False, "coerce_one_of": False}
STRING = {"type": "string"}
SCHEMAS = {
    "free": {"type": "object"},
    "bounded": {"type": "string", "maxLength": 7},
    "both bounds": {"type": "string", "minLength": 4, "maxLength": 30},
    "shorter": {"allOf": [{"type": "string", "maxLength": 5}, {"minLength": 2}]},
    "choice of bounds": {"anyOf": [{"type": "string", "maxLength": n} for n in (3, 9)]},
    "choice with a literal": {"anyOf": [{"type": "string", "maxLength": 5}, {"const": "abc"}]},
    "optional": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}},
    "format": {"type": "array", "items": {"type": "string", "format": "date"}},
    "tilde": {"anyOf": [{"const": "~~~~~~"}, {"type": "object"}]},
    "wide": wide_schema(10),
}
UNPLAIN = {
    "pattern": {"type": "string", "pattern": "^[^x]*$"},
    "email": {"type": "string", "format": "email"},
    "longer literal": {"anyOf": [{"type": "string", "maxLength": 2}, {"const": "abcdef"}]},
    "format beside": {"anyOf": [{"type": "string", "maxLength": 2}, {**STRING, "format": "date"}]},
    "names by pattern": {"type": "object", "patternProperties": {"^[^x]*$": {}}},
    "every probe": {"enum": ["~^`@%#;&!<>=_/$"]},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = grammars_of(resolve_model("embedded"), VOCAB)
    assert found is not None
    return found


def grammar_of(schema: dict) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)


def walk(grammars: Grammars, grammar: str, seed: int, steps: int = 60) -> int:
    """Compares masks along a random output; returns the number with inserted plain tokens."""
    whole = compile_grammar(grammars.tokenizer, grammar)
    matcher = grammars.matcher(grammar)
    expected, found = np.empty((2, grammars.words), np.int32)
    draw, short = random.Random(seed), 0
    for _ in range(steps):
        whole.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
        matcher.current.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        before = found.copy()
        matcher.complete(found)
        np.testing.assert_array_equal(found, expected)
        short += bool((found != before).any())
        allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
        # Escapes, quotes and parts of characters are frequent, too.
        texts = [grammars.tokenizer.decode_bytes([token]) for token in allowed.tolist()]
        rare = [i for i, text in enumerate(texts) if not text.isascii() or b"\\" in text]
        some = rare if rare and draw.random() < 0.3 else range(len(texts))
        token = int(allowed[draw.choice(some)])
        if token in grammars.tokenizer.eos_tokens:
            break
        assert whole.consume_token(token)
        assert matcher.consume(token)
    return short


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_one_matcher(grammars: Grammars, name: str) -> None:
    grammar = grammar_of(SCHEMAS[name])
    assert probe_of(grammar) is not None
    short = sum(walk(grammars, grammar, seed) for seed in range(12))
    assert short > 0 or name == "format"


@pytest.mark.parametrize("name", UNPLAIN)
def test_other_strings_have_one_matcher(grammars: Grammars, name: str) -> None:
    grammar = grammar_of(UNPLAIN[name])
    assert probe_of(grammar) is None
    assert not walk(grammars, grammar, 0)


def test_masks_of_random_schemas(grammars: Grammars) -> None:
    short = 0
    for seed in range(40):
        schema = random_schema(seed)
        with_real_dates(schema)
        short += walk(grammars, grammar_of(schema), seed, steps=40)
    assert short > 20


def test_grammars_that_are_no_schema_have_one_matcher() -> None:
    assert probe_of(LLMatcher.grammar_from_regex("[a-z]*")) is None
    assert probe_of('start: "a"') is None
    wild = {**OPTIONS, "whitespace_pattern": "[^x]"}
    assert probe_of(LLMatcher.grammar_from_json_schema({}, overrides=wild)) is None
    assert probe_of(LLMatcher.grammar_from_json_schema({})) is None


def test_a_probe_is_not_in_the_schema() -> None:
    assert probe_of(grammar_of({"const": "ab"})) == "~"
    assert probe_of(grammar_of({"properties": {"~": {}}})) == "^"
    assert probe_of(json.dumps(json.loads(grammar_of({"const": "\u007e"})))) == "^"


def test_a_token_that_the_grammar_does_not_allow_is_refused(grammars: Grammars) -> None:
    for text, bad in (('"', "a"), ('"abcdefg', "h"), ('"abc', "defgh"), ('"ab"', "c")):
        matcher = grammars.matcher(grammar_of(SCHEMAS["bounded"]))
        for token in grammars.tokenizer.tokenize_str(text):
            assert matcher.consume(token)
        refused = [matcher.consume(token) for token in grammars.tokenizer.tokenize_str(bad)]
        assert all(refused) == (text == '"')
        assert matcher.current.is_error() == (text != '"')


def test_places(grammars: Grammars) -> None:
    strings = StringTokens(grammars.tokenizer)
    (quote,) = grammars.tokenizer.tokenize_str('"')
    (backslash,) = grammars.tokenizer.tokenize_str("\\")
    place = OUTSIDE
    steps = (
        (quote, INSIDE),
        (backslash, ESCAPED),
        (quote, INSIDE),
        (backslash, ESCAPED),
        (backslash, INSIDE),
        (quote, OUTSIDE),
    )
    for token, expected in steps:
        place = strings.after[place][token]
        assert place == expected
