"""From a StructuredOutput to a grammar: compiled ones, and refusals with reasons."""

import datetime
import itertools
import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from pagewire.bench.schemas import random_schema, wide_schema
from pagewire.errors import RequestError
from pagewire.grammars.limits import parser_limits
from pagewire.models import resolve_model
from pagewire.scheduler.structured.checked_grammars import check_form
from pagewire.scheduler.structured.compilation import check_size, compiled, read_tokenizer
from pagewire.v1 import inference_pb2 as pb
from support.hostile_grammars import HOSTILE

TOKENIZER = read_tokenizer(resolve_model("embedded"))
BEYOND = (1 << 53) + 1  # not exact in double precision
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar(**fields: Any) -> str:
    output = pb.StructuredOutput(**fields)
    check_size(output, 4096)
    return compiled(output, TOKENIZER)


def schema(value: Any, **fields: Any) -> str:
    return grammar(json_schema=json.dumps(value), field_name="f", **fields)


def accepts(text: str, made: str) -> bool:
    """Whether a text is a whole output."""
    matcher = LLMatcher(TOKENIZER, made, limits=parser_limits())
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("made", "good", "bad"),
    [
        (grammar(json_object=True), '{"x": [1]}', "[1]"),
        (schema(OBJECT), '{"a":1}', '{"a":"x"}'),
        (schema(OBJECT), '{\n  "a": 1\n}', '{\n\n\n"a":1}'),
        (schema(OBJECT, whitespace_pattern="_"), '{_"a":1}', '{ "a":1}'),
        (grammar(regex="a+b?"), "aab", "b"),
        (grammar(choice=pb.Choices(values=["ja", "nein", 'ü"\\'])), 'ü"\\', "j"),
        (grammar(grammar='start: "x" /[0-9]+/'), "x12", "x"),
        (grammar(grammar='root ::= "x" [0-9]+'), "x12", "x"),
    ],
)
def test_kinds(made: str, good: str, bad: str) -> None:
    assert accepts(good, made)
    assert not accepts(bad, made)


def test_many_choices() -> None:
    choices = [f"choice {i}" for i in range(3000)]
    made = grammar(choice=pb.Choices(values=choices))
    assert all(accepts(text, made) for text in (choices[0], choices[2500], choices[-1]))
    assert not accepts("choice 3000", made)
    assert not accepts("choice", made)


def test_a_pattern_of_white_space_is_named() -> None:
    with pytest.raises(RequestError, match="whitespace_pattern cannot be compiled") as caught:
        schema(OBJECT, whitespace_pattern="(")
    assert caught.value.field == "whitespace_pattern"


def test_a_grammar_that_takes_no_token_is_refused() -> None:
    rules = " | ".join(f'"choice {i}"' for i in range(3000))
    with pytest.raises(RequestError, match=r"grammar cannot be compiled: .*max is 2000"):
        grammar(grammar=f"start: {rules}")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ({"const": 1 << 53}, 1 << 53),
        ({"enum": [1e300, 3 << 60]}, 3 << 60),
        ({"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}, (1 << 63) - 1),
        ({"type": "integer", "minimum": 1 - BEYOND, "maximum": BEYOND - 1}, 1 - BEYOND),
    ],
)
def test_numbers_at_their_limits_are_exact(value: Any, number: int) -> None:
    made = schema(value)
    assert accepts(str(number), made)
    outer = number + (1 if number > 0 else -1)
    assert not accepts(str(outer), made)


@pytest.mark.parametrize("fields", [{}, {"pattern": "^[0-9]"}])
@pytest.mark.parametrize(("form", "ending"), [("date", ""), ("date-time", "T10:20:30Z")])
def test_dates_exist(fields: dict[str, str], form: str, ending: str) -> None:
    made = schema({"type": "string", "format": form, **fields})
    years = (0, 1, 4, 99, 100, 400, 1900, 2000, 2023, 2024, 9999)
    for year, (month, day) in itertools.product(years, [(2, 28), (2, 29), (2, 30), (12, 31)]):
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            datetime.date.fromisoformat(text)
            exists = True
        except ValueError:
            exists = False
        assert accepts(json.dumps(text + ending), made) == exists, text


def test_tags_are_single_tokens_where_the_model_has_them() -> None:
    made = grammar(grammar='start: text_to_tag_0 "a" tag_1', tags=["<|im_start|>", "<end>"])
    (start,) = TOKENIZER.tokenize_str("<|im_start|>", parse_special=True)
    before, after = TOKENIZER.tokenize_str("some words"), TOKENIZER.tokenize_str("a<end>")
    matcher = LLMatcher(TOKENIZER, made)
    assert matcher.try_consume_tokens([*before, start, *after]) == len(before) + 1 + len(after)
    assert matcher.is_accepting()
    spelled = [*TOKENIZER.tokenize_str("<|im_"), *TOKENIZER.tokenize_str("start|>")]
    matcher = LLMatcher(TOKENIZER, made)
    assert matcher.try_consume_tokens([*before, *spelled, *after])
    assert not matcher.is_accepting(), "spelled out, it is text"
    plain = grammar(grammar='start: text_to_tag_0 "a"', tags=["<tag>"])
    assert accepts("some<end> words<tag>a", plain)
    assert not accepts("some<end> words<tag>b", plain)
    assert not accepts("some<end> words", plain)
    with pytest.raises(RequestError, match="tags needs a grammar"):
        check_form(pb.StructuredOutput(regex="a", tags=["<tag>"]))
    with pytest.raises(RequestError, match="parts needs a grammar"):
        check_form(pb.StructuredOutput(regex="a", parts=[pb.GrammarPart(first_line=1)]))


def test_a_structural_tag_constrains_what_follows_its_trigger() -> None:
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": OBJECT, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    made = grammar(structural_tag=json.dumps(tag))
    assert accepts('some text <f=a>{"a": 1}</f> more <f=b>"x"</f> end', made)
    assert accepts("no tag at all", made)
    assert not accepts('text <f=a>{"a": "x"}</f>', made)
    assert not accepts("text <f=c>", made)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"contains": {}}, "not supported: contains"),
        ({"oneOf": [{}, {}]}, "use anyOf"),
        (
            {"type": "string", "format": "password"},
            "has format 'password', which is not supported; use a pattern, or remove it",
        ),
    ],
)
def test_what_a_tag_does_not_enforce_is_refused_by_name(inner: Any, words: str) -> None:
    structures = [{"begin": "<f>", "schema": inner, "end": "</f>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    with pytest.raises(RequestError, match=words):
        grammar(structural_tag=json.dumps(tag))


@pytest.mark.parametrize("text", ["\x7f", "\x01\n\t", '"\\/', "\u2028\ufeff", "\x80"])
def test_a_choice_may_have_any_character(text: str) -> None:
    made = grammar(choice=pb.Choices(values=[text, "other"]))
    assert accepts(text, made)
    assert not accepts(f"{text}x", made)


def test_random_schemas_compile() -> None:
    for seed in range(200):
        schema(random_schema(seed))
    schema(wide_schema(100))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {}}}, "required": ["a"]}, "not"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "anyOf"),
        ({"$ref": "http://example.org/schema"}, "example.org"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "minProperties": 2, "required": 5}, "minProperties"),
        ({"type": "object", "minProperties": 2, "required": ["a", "a", [1]]}, "minProperties"),
        ({"const": BEYOND}, f"const {BEYOND}"),
        ({"enum": [0, {"a": [-BEYOND]}]}, f"enum -{BEYOND}"),
        ({"type": "integer", "maximum": BEYOND + 2}, "maximum"),
        ({"type": "integer", "minimum": 10**19}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": (1 << 63) - 1}, "exclusiveMinimum"),
        ({"type": "integer", "multipleOf": BEYOND}, "multipleOf"),
        ({"enum": [10**400]}, "enum 1000"),
        ({"type": "text"}, "text"),
        ({"x-guidance": {"size": 1}}, "coerce_one_of"),
        (False, "object"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {}]}, "anyOf"),
        ([1], "object"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        schema(value)
    assert refused.value.field == "f"
    assert words in refused.value.message
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"properties": {"a": {"anyOf": [{"minProperties": 3}]}}}, "minProperties 3"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {}]}, "anyOf"),
        ({"enum": list(range(5000))}, "5002 values"),
    ],
)
@pytest.mark.parametrize(
    "lark",
    [
        'start: "a" | b\nb: %jsonSCHEMA',
        'start: "%json {" /[%json\\/]/ | b // "\nb: %json\n SCHEMA\n# /',
        'start: "a" | b\nb: (%json SCHEMA "," %json {"type": "object"})*',
        'start: %regex {"substring_chars": "/"} | b\nb: %json SCHEMA',
        "start: <|im_start|> a | b\na: /[^%]/\nb: %json SCHEMA",
    ],
)
def test_schemas_within_a_grammar_are_checked_as_others_are(
    lark: str, value: Any, words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        grammar(grammar=lark.replace("SCHEMA", json.dumps(value)), field_name="f")
    assert refused.value.field == "f"
    assert words in refused.value.message


def test_dates_within_a_grammar_exist() -> None:
    date = '{"type": "string", "format": "date", "x-guidance": {"whitespace_flexible": false}}'
    made = grammar(grammar=f'start: "on %json {{" %json {date} "." (%json {{"enum": [1]}})?')
    assert accepts('on %json {"2024-02-29".', made)
    assert accepts('on %json {"2024-02-29".1', made)
    assert not accepts('on %json {"2023-02-29".', made)


def test_text_that_looks_like_a_schema_is_none() -> None:
    hidden = '%json {"minProperties": 9}'
    regex = r'/a%json \{"minProperties": 9\}/'
    made = grammar(grammar=f"start: {json.dumps(hidden)} {regex} // {hidden}")
    assert accepts(f"{hidden}a{hidden}", made)


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a\\", "f cannot be compiled: it ends with a backslash that escapes nothing"),
        ("a\\\\\\", "f cannot be compiled: it ends with a backslash that escapes nothing"),
        (r"[^\x00-\x{10FFFF}]", "f allows no text at all"),
    ],
)
def test_a_regex_that_cannot_be_kept_is_refused(regex: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammar(regex=regex, field_name="f")
    assert refused.value.message.startswith(words)


def test_a_regex_may_end_with_an_escaped_backslash() -> None:
    assert accepts("a\\", grammar(regex="a\\\\"))


def test_min_properties_that_required_names_fulfil_is_accepted() -> None:
    schema({**OBJECT, "minProperties": 1})
    schema({"enum": [{"minProperties": 9}], "properties": {"minProperties": {}}})


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_take_little_time(name: str) -> None:
    """To compile or be refused, and then for each mask. Longer work ends with its process."""
    began = time.process_time()
    try:
        made = grammar(**HOSTILE[name])
    except RequestError:
        made = None
    assert time.process_time() - began < 1.0
    if made is None:
        return
    matcher = LLMatcher(TOKENIZER, made, log_level=0, limits=parser_limits())
    longest = 0.0
    for _ in range(40):
        began = time.process_time()
        mask = matcher.compute_bitmask()
        longest = max(longest, time.process_time() - began)
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [i for i in range(3, 4096) if mask[i // 8] >> (i % 8) & 1]
        if not allowed:
            break
        matcher.consume_token(allowed[len(allowed) // 2])
    assert longest < 0.2
