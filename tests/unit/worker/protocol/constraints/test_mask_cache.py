"""Masks that sequences of a grammar share are those of a matcher of each sequence."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.bench.schemas import random_schema, wide_schema
from pagewire.grammars.dates import with_real_dates
from pagewire.models import resolve_model
from pagewire.worker.protocol.constraints import grammars as grammars_module
from pagewire.worker.protocol.constraints import mask_cache
from pagewire.worker.protocol.constraints.grammars import Grammars, compile_grammar, grammars_of
from pagewire.worker.protocol.constraints.json_shapes import shape_of
from pagewire.worker.protocol.constraints.mask_cache import CachedMatcher

OPTIONS = {"whitespace_pattern": r" |\n {0,20}", "lenient": False, "coerce_one_of": False}


def record(**properties: object) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


STRING = {"type": "string"}
CHOICE = {"anyOf": [{"type": "string", "maxLength": 5}, {"const": "abc"}, {"type": "null"}]}
SCHEMAS = {
    "strings": record(a=STRING, b={**STRING, "maxLength": 9}, c={**STRING, "minLength": 3}),
    "long strings": {"type": "array", "items": {**STRING, "minLength": 30, "maxLength": 90}},
    "numbers": record(n={"type": "number"}, i={"type": "integer"}, m={"type": "number"}),
    "bounded numbers": {"type": "array", "items": {"type": "number", "minimum": -3.5}},
    "values": record(a={"enum": ["x", "xy", 7]}, b={"type": "boolean"}, c=CHOICE, d=STRING),
    "shaped": {"type": "array", "items": record(a={**STRING, "pattern": "^[A-Z]{2}-[0-9]{2}$"})},
    "counted": {"type": "array", "items": record(a={"enum": [1]}), "minItems": 5, "maxItems": 12},
    "tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["a"]}, {"type": "number"}],
        "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2},
        "minItems": 4,
    },
    "optional": {**record(a={"enum": [1, 2]}, b=STRING, c={"type": "null"}), "required": ["b"]},
    "open": {"type": "object", "properties": {"ab": {"enum": [1]}}, "required": ["ab", "cd"]},
    "open to numbers": {**record(ab=STRING), "additionalProperties": {"type": "integer"}},
    "names": record(**{"é": STRING, "n" * 60: {"type": "null"}, "n" * 59: STRING}),
    "recursive": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/tree"}, "s": STRING},
        "required": ["t", "s"],
    },
    "wide": {"type": "array", "items": wide_schema(10), "minItems": 3},
}


class User:
    """Of a lexer."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = grammars_of(resolve_model("embedded"), 4096)
    assert found is not None
    return found


def grammar_of(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)


def walk(grammars: Grammars, grammar: str, draw: random.Random, steps: int) -> Counter[str]:
    """Compares the masks along a random output; counts those that were known and computed."""
    whole = compile_grammar(grammars.tokenizer, grammar)
    inner, _ = grammars.matcher(grammar, User())
    matcher = CachedMatcher(inner, grammars.cache(grammar))
    expected, found = np.empty((2, grammars.words), np.int32)
    counts: Counter[str] = Counter()
    text = b""
    for _ in range(steps):
        whole.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
        known = matcher.known
        if known is None:
            matcher.current.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
            accepting = matcher.complete(found)
        else:
            known.write(found)
            accepting = known.accepting
        counts["known" if known else "computed"] += 1
        matcher.settle()
        np.testing.assert_array_equal(found, expected, err_msg=repr(text))
        assert accepting == whole.is_accepting(), text
        allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
        texts = [grammars.tokenizer.decode_bytes([token]) for token in allowed.tolist()]
        # Short ones, so that outputs meet, and the marks of JSON, so that values end.
        kind = draw.random()
        marks = [i for i, each in enumerate(texts) if not each.isalnum() and len(each) < 6]
        short = [i for i, each in enumerate(texts) if len(each) < 2 or not each.isascii()]
        some = marks if kind < 0.4 else short if kind < 0.7 else []
        token = int(allowed[draw.choice(some or range(len(texts)))])
        if token in grammars.tokenizer.eos_tokens:
            break
        text += grammars.tokenizer.decode_bytes([token])
        assert whole.consume_token(token)
        assert matcher.consume(token), text
    return counts


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_one_matcher(grammars: Grammars, name: str) -> None:
    draw, grammar = random.Random(name), grammar_of(SCHEMAS[name])
    counts = sum((walk(grammars, grammar, draw, 60) for _ in range(12)), Counter[str]())
    assert counts["known"] > counts["computed"] / 8


def test_masks_of_random_schemas(grammars: Grammars) -> None:
    counts: Counter[str] = Counter()
    for seed in range(20):
        item = random_schema(seed)
        schema = {"type": "array", "items": item, "$defs": item.pop("$defs", {})}
        with_real_dates(schema)
        draw, grammar = random.Random(seed), grammar_of(schema)
        for _ in range(4):
            counts += walk(grammars, grammar, draw, 40)
    assert counts["known"] > counts["computed"] / 8


def test_masks_stay_right_when_they_are_forgotten(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of sequences that are on their way."""
    monkeypatch.setattr(mask_cache, "MAX_BYTES", 20_000)
    grammar = grammar_of({"type": "array", "items": SCHEMAS["strings"]})
    inner, _ = grammars.matcher(grammar, User())
    cache = grammars.cache(grammar)
    matcher, draw = CachedMatcher(inner, cache), random.Random(0)
    assert cache is not None
    for _ in range(6):
        walk(grammars, grammar, draw, 40)
        assert cache.nbytes <= 20_000
    assert matcher.known is None
    assert all(map(matcher.consume, grammars.tokenizer.tokenize_str('[{"a": "')))


def test_sequences_stop_looking_where_none_has_been(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but some, and all look again once these find what they look for."""
    monkeypatch.setattr(mask_cache, "FEW_CORES", False)
    monkeypatch.setattr(mask_cache, "_COUNTED", 40)
    text = {**STRING, "pattern": "^[a-z0-9]{0,90}$"}
    grammar, draw = grammar_of({"type": "array", "items": text, "minItems": 9}), random.Random(1)
    for _ in range(6):
        walk(grammars, grammar, draw, 30)
    cache = grammars.cache(grammar)
    assert cache is not None
    assert not cache.pays(1)
    assert cache.pays(8)
    assert sum(walk(grammars, grammar, draw, 9)["known"] == 0 for _ in range(3)) >= 2
    cache.count(10_000)
    assert cache.pays(1)


def test_all_grammars_together_have_a_bound(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_CACHED_BYTES", 60_000)
    monkeypatch.setattr(mask_cache, "_REPORTED", 1000)
    draw, caches = random.Random(0), []
    for number in range(6):
        grammar = grammar_of(record(a=STRING, b={"enum": [number]}))
        for _ in range(4):
            walk(grammars, grammar, draw, 30)
        caches.append(grammars.cache(grammar))
    assert caches[0].nbytes == 0 < caches[-1].nbytes
    assert sum(each.nbytes for each in caches) < 70_000


def test_what_a_schema_demands_of_several_values_is_not_forgotten() -> None:
    for schema in (
        {"type": "string"},
        {"anyOf": [SCHEMAS["strings"], SCHEMAS["numbers"]]},
        {**SCHEMAS["strings"], "allOf": [{"required": ["a"]}]},
        {**SCHEMAS["strings"], "$defs": {"x": {"$id": "https://example.com/x"}}},
        record(**{'a"': STRING}),
    ):
        assert shape_of(grammar_of(schema)) is None
    assert shape_of(LLMatcher.grammar_from_regex("[a-z]*")) is None
    assert shape_of('start: "a"') is None
    wild = {**OPTIONS, "whitespace_pattern": "[0-9 ]"}
    text = json.dumps(SCHEMAS["strings"])
    assert shape_of(LLMatcher.grammar_from_json_schema(text, overrides=wild)) is None
    assert shape_of(grammar_of(SCHEMAS["strings"])) is not None


def test_a_token_that_is_not_allowed_is_refused_where_the_mask_is_known(
    grammars: Grammars,
) -> None:
    grammar = grammar_of(SCHEMAS["values"])
    for seed in range(30):
        walk(grammars, grammar, random.Random(seed), 20)
    inner, _ = grammars.matcher(grammar, User())
    matcher = CachedMatcher(inner, grammars.cache(grammar))
    for token in grammars.tokenizer.tokenize_str('{"a"'):
        assert matcher.consume(token)
    (letter,) = grammars.tokenizer.tokenize_str("x")
    assert not matcher.consume(letter)
    assert matcher.current.is_error()


def test_long_and_deep_outputs_are_followed_without_a_place(grammars: Grammars) -> None:
    """Beyond the limits every mask is computed, and the same."""
    nested = {"$ref": "#/$defs/tree"}
    lists = {"type": "array", "items": nested}
    lists_in_lists = {"$defs": {"tree": lists}, **lists}
    for schema, text in (
        (lists_in_lists, "[" * 40 + "]" * 40),
        ({"type": "object"}, json.dumps({f"name {i}": "x" * i for i in range(60)})),
        (record(a={"type": "object"}, b=STRING), '{"a": {"x": "' + "y" * 90 + '"}, "b": "z"}'),
    ):
        grammar = grammar_of(schema)
        whole = compile_grammar(grammars.tokenizer, grammar)
        expected, found = np.empty((2, grammars.words), np.int32)
        for _ in range(3):
            one = whole.deep_copy()
            inner, _ = grammars.matcher(grammar, User())
            matcher = CachedMatcher(inner, grammars.cache(grammar))
            for token in grammars.tokenizer.tokenize_str(text):
                one.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
                if (known := matcher.known) is not None:
                    known.write(found)
                else:
                    matcher.current.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
                    matcher.complete(found)
                matcher.settle()
                np.testing.assert_array_equal(found, expected)
                assert one.consume_token(token)
                assert matcher.consume(token)
            assert matcher.current.is_accepting()
