"""Every split of a text yields the events of the whole text, and no text is lost."""

import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.gateway.parsers.events import CallArguments, CallBegin, Event
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.gateway.parsers.output_parser import OutputParser
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS
from support.parsers import (
    deepseek,
    harmony,
    hermes,
    llama3_json,
    mistral,
    others,
    pythonic,
    qwen3_coder,
    reasoning,
)
from support.parsers.notation import Case, Types, shortened
from support.parsers.texts import CHANNEL_TEXTS, TEXTS

FORMATS: dict[str, tuple[list[Case], Types]] = {
    "hermes": (hermes.CASES, {}),
    "llama3_json": (llama3_json.CASES, llama3_json.TYPES),
    "qwen3_coder": (qwen3_coder.CASES, qwen3_coder.TYPES),
    "mistral": (mistral.CASES, {}),
    "pythonic": (pythonic.CASES, pythonic.TYPES),
    "deepseek_v3": (deepseek.CASES, {}),
    "deepseek_v31": (deepseek.CASES, {}),
    "kimi_k2": (others.KIMI, {}),
    "glm45": (others.GLM, others.GLM_TYPES),
    "granite": (others.GRANITE, {}),
    "seed_oss": (others.SEED, {}),
    "harmony": (harmony.CASES, {}),
    "json": (others.FORCED, others.FORCED_TYPES),
}
CASES = [(name, types, case) for name, (cases, types) in FORMATS.items() for case in cases]


def parser(
    tools: str | None, types: Types, reasoning: str | None = None, in_reasoning: bool = False
) -> OutputParser:
    return OutputParser(
        REASONING_FORMATS[reasoning] if reasoning else None,
        in_reasoning,
        TOOL_FORMATS[tools] if tools else None,
        types,
    )


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def splits(text: str) -> Iterable[list[str]]:
    """The whole text, every cut in two, single characters, and groups of them."""
    yield [text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    for size in (1, 2, 3, 5, 7):
        yield [text[at : at + size] for at in range(0, len(text), size)]


def test_each_format_has_its_fixtures() -> None:
    named = {"hermes", "llama3_json", "qwen3_coder", "mistral", "pythonic", "deepseek_v3"}
    assert len(harmony.CASES) + len(harmony.CHANNELS) >= 60
    assert {*FORMATS} == {*TOOL_FORMATS}
    assert all(len(FORMATS[name][0]) >= 60 for name in named)
    for cases, _ in FORMATS.values():
        assert len({text for text, _ in cases}) == len(cases), "a fixture is there twice"


@pytest.mark.parametrize(("tools", "types", "case"), CASES)
def test_the_events_of_a_text_however_it_is_split(tools: str, types: Types, case: Case) -> None:
    text, expected = case
    for pieces in splits(text):
        assert shortened(events_of(parser(tools, types), pieces)) == expected, pieces


@pytest.mark.parametrize(("name", "in_reasoning", "case"), reasoning.CASES)
def test_reasoning_comes_before_content_and_calls(
    name: str, in_reasoning: bool, case: Case
) -> None:
    text, expected = case
    for pieces in splits(text):
        found = events_of(parser("hermes", {}, name, in_reasoning), pieces)
        assert shortened(found) == expected, pieces


HARMONY = [
    *(("harmony", case) for case in harmony.CHANNELS),
    *((None, case) for case in harmony.NO_TOOLS),
    *(("json", case) for case in harmony.FORCED),
]


@pytest.mark.parametrize(("tools", "case"), HARMONY)
def test_channels_however_they_are_split(tools: str | None, case: Case) -> None:
    text, expected = case
    for pieces in splits(text) if len(text) < 1000 else ([text], text):
        found = events_of(parser(tools, {"f": {}}, "harmony"), pieces)
        assert shortened(found) == expected, pieces


@pytest.mark.parametrize("tools", ["harmony", "json", None])
@settings(max_examples=200, deadline=None)
@given(text=CHANNEL_TEXTS, cuts=st.lists(st.integers(0, 300), max_size=6))
def test_any_channels_have_the_same_events_however_they_are_split(
    tools: str | None, text: str, cuts: list[int]
) -> None:
    types = {"f": {"a": frozenset({"integer"})}}
    whole = shortened(events_of(parser(tools, types, "harmony"), [text]))
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert shortened(events_of(parser(tools, types, "harmony"), pieces)) == whole
    assert shortened(events_of(parser(tools, types, "harmony"), text)) == whole


def test_where_the_reasoning_of_channels_ends() -> None:
    reader = parser("harmony", {}, "harmony")
    assert reader.reasoning_state == "none"
    reader.feed("<|channel|>analysis<|message|>why")
    assert (reader.reasoning_state, reader.reasoning_ends) == ("open", 0)
    reader.feed("<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>")
    assert (reader.reasoning_state, reader.reasoning_ends) == ("ended", 1)
    reader.feed("<|start|>assistant<|channel|>analysis<|message|>more<|end|><|start|>assistant")
    assert (reader.reasoning_state, reader.reasoning_ends) == ("ended", 3)
    output = OutputFormat(reasoning="harmony", reasoning_end_token=7)
    assert output.reasoning_tokens(reader, [1, 2, 7, 3, 7, 4, 7, 5]) == 7
    assert output.reasoning_tokens(reader, [1, 2, 7, 3]) is None


@pytest.mark.parametrize("tools", FORMATS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 300), max_size=6), thinks=st.booleans())
def test_any_text_has_the_same_events_however_it_is_split(
    tools: str, text: str, cuts: list[int], thinks: bool
) -> None:
    types = {"f": {"a": frozenset({"integer"})}}
    reasoning = "think" if thinks else None
    whole = shortened(events_of(parser(tools, types, reasoning), [text]))
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert shortened(events_of(parser(tools, types, reasoning), pieces)) == whole
    assert shortened(events_of(parser(tools, types, reasoning), text)) == whole
    if not thinks and all(isinstance(item, str) for item in whole):
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", hermes.F + " and so on" * 10_000),
        ("hermes", "<tool_call>" * 9_000),
        ("hermes", '<tool_call>{"arguments": {"a": "' + "x" * 100_000),
        ("llama3_json", '{"name": "' + "x" * 100_000),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "x\n" * 50_000),
        ("qwen3_coder", "<" * 100_000),
        ("pythonic", '[f(a="' + "x" * 100_000),
        ("mistral", "\n" * 100_000),
        ("harmony", "<|channel|>" * 9_000),
    ],
)
def test_the_cost_of_a_text_grows_with_its_length(tools: str, text: str) -> None:
    began = time.process_time()
    events_of(parser(tools, FORMATS[tools][1]), text)
    assert time.process_time() - began < 3, "0.2 s is usual"


def test_arguments_stream() -> None:
    reader = parser("hermes", {})
    assert reader.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.feed("{") == [CallBegin(0, "f"), CallArguments(0, "{")]
    for piece in ('"a"', ': "x', "y", "z"):
        assert reader.feed(piece) == [CallArguments(0, piece)]


def test_calls_beyond_the_limit_are_left_out() -> None:
    spec = TOOL_FORMATS["hermes"]
    text = "a" + hermes.F + "b" + hermes.F + "c"
    found = events_of(OutputParser(tools=spec, max_calls=1), text)
    assert shortened(found) == ["a", ("f", "{}"), "bc"]
    assert shortened(events_of(OutputParser(tools=spec, max_calls=0), text)) == ["abc"]
