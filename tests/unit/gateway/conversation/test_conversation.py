"""From a conversation to a scheduler's input, the format of its answer, and its grammar."""

import json
from typing import Any

import llguidance
import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.chat import Message
from pagewire.gateway.conversation.conversation import Conversation, ReasoningOptions
from pagewire.gateway.conversation.limits import ToolLimits
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolOptions
from pagewire.gateway.conversation.turns import ToolCall, Turn
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsers.events import CallArguments
from pagewire.output_formats import TOOL_FORMATS
from pagewire.scheduler.structured.compilation import check_size, compiled
from pagewire.scheduler.structured.grammars import grammar_text
from pagewire.v1 import inference_pb2 as pb

LIMITS = ToolLimits()
HELLO = [Turn("user", "Hello")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
F = Tool("f", "does", SCHEMA)
G = Tool("g", strict=True)
# Formats whose calls a grammar can describe.
ENFORCED = {name for name, spec in TOOL_FORMATS.items() if spec.frames}
STARTS = (
    pb.REASONING_START_IN_PROMPT,
    pb.REASONING_START_BY_MODEL,
    pb.REASONING_START_NONE,
)
THINKS = ServedModel(100, "hermes", "think", STARTS, 7)


def conversation(*tools: Tool, mode: Any = "auto", name: str = "", **fields: Any) -> Conversation:
    return Conversation(HELLO, ToolOptions(tools, ToolChoice(mode, name)), **fields)


def test_templates_get_tools_and_calls_as_from_transformers() -> None:
    turns = [
        Turn("user", "Hello"),
        Turn("assistant", None, tool_calls=(ToolCall("1", "f", '{"a": "é"}'),), reasoning="so"),
        Turn("tool", "sunny", tool_call_id="1"),
        Turn("assistant", ""),
    ]
    chat = Conversation(turns, ToolOptions((F, G))).chat_input(LIMITS)
    assert json.loads(chat.tools) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "does", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "g"}},
    ]
    _, called, result, silent = chat.messages
    function = {"name": "f", "arguments": {"a": "é"}}
    assert json.loads(called.tool_calls) == [{"id": "1", "type": "function", "function": function}]
    assert (called.null_content, called.reasoning_content) == (True, "so")
    assert (result.role, result.tool_call_id, result.content) == ("tool", "1", "sunny")
    assert (silent.null_content, silent.HasField("reasoning_content")) == (False, False)


def test_a_model_that_may_call_nothing_gets_no_tools() -> None:
    assert conversation(F, mode="none").chat_input(LIMITS).tools == ""
    assert conversation(F, mode="none").output_format(ServedModel(100)) is None
    assert conversation(F).output_format(ServedModel(100, "hermes")) is not None


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([Tool("f", parameters={"a": "x" * 200})], "tools"),
        ([Tool("f", parameters={"enum": [1] * 30})], "tools"),
        ([Tool(f"f{i}") for i in range(5)], "tools"),
    ],
)
def test_tools_are_bounded(tools: list[Tool], field: str) -> None:
    limits = ToolLimits(max_tools=4, max_tool_bytes=150, max_tool_nodes=20)
    with pytest.raises(RequestError) as refused:
        conversation(*tools).chat_input(limits)
    assert refused.value.field == field
    assert "--max-tool" in refused.value.message


def test_the_calls_of_a_conversation_are_bounded() -> None:
    call = ToolCall("1", "f", json.dumps({"a": "x" * 100}))
    limits = ToolLimits(max_tool_bytes=1000)
    Conversation([Turn("assistant", None, tool_calls=(call,))]).chat_input(limits)
    with pytest.raises(RequestError, match="--max-tool-bytes"):
        Conversation([Turn("assistant", None, tool_calls=(call,))] * 20).chat_input(limits)


def test_tools_need_a_format_unless_a_call_is_forced() -> None:
    with pytest.raises(RequestError) as refused:
        conversation(F).output_format(ServedModel(100))
    assert (refused.value.field, "--tool-parser" in refused.value.message) == ("tools", True)
    forced = conversation(F, mode="required").output_format(ServedModel(100))
    assert forced is not None
    assert forced.tools == "json"


def test_reasoning_begins_as_the_prompt_ends() -> None:
    def begins_inside(**fields: Any) -> bool:
        output = Conversation(HELLO, **fields).output_format(THINKS)
        assert output is not None
        return output.in_reasoning

    assert begins_inside()
    assert not begins_inside(variables={"enable_thinking": True})
    assert not begins_inside(variables={"thinking": False})
    assert not begins_inside(reasoning=ReasoningOptions(effort="none"))
    assert begins_inside(reasoning=ReasoningOptions(effort="high"))
    assert not begins_inside(add_generation_prompt=False)


def test_a_template_of_the_request_without_the_tag_does_not_begin_the_reasoning() -> None:
    model = ServedModel(100, "", "think", (pb.REASONING_START_IN_PROMPT,) * 3)
    for template, inside in ((None, True), ("{{ m }}<think>\n", True), ("{{ m }}", False)):
        output = Conversation(HELLO, template=template).output_format(model)
        assert output is not None
        assert output.in_reasoning is inside


def test_effort_is_a_variable_of_the_template() -> None:
    chat = Conversation(HELLO, reasoning=ReasoningOptions(effort="none")).chat_input(LIMITS)
    assert dict(chat.template_kwargs) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    given = {"enable_thinking": True}
    chat = Conversation(HELLO, reasoning=ReasoningOptions(effort="none"), variables=given)
    assert chat.chat_input(LIMITS).template_kwargs["enable_thinking"] is True


BYTES = llguidance.LLTokenizer("byte")


def grammar_of(constraint: pb.StructuredOutput | None) -> str:
    """The constraint in llguidance's form."""
    assert constraint is not None
    return grammar_text(constraint, BYTES)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows the bytes of a text as a whole output."""
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LLAMA = '{{"name": "{}", "parameters": {}}}'
JSON = '{{"name": "{}", "arguments": {}}}'
XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
A = "<parameter=a>\n{}\n</parameter>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def jsons(form: str, begin: str = "", close: str = "", between: str = "") -> tuple[str, ...]:
    """Texts of calls in a format whose arguments are JSON."""
    good, other = form.format("f", '{"a": 1}'), form.format("g", "{}")
    bad = form.format("f", '{"a": "x"}')
    both = begin + good + between + other + close
    return begin + good + close, both, begin + bad + close


def xml(tag: str) -> tuple[str, ...]:
    texts = [XML.format("f", A.format(1)), XML.format("g", ""), XML.format("f", A.format('"x"'))]
    good, other, bad = (text.replace("tool_call", tag) for text in texts)
    return good, good + "\n" + other, bad


SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
# By parser: a call of `f`, calls of `f` and `g`, a call of `f` with a wrong argument.
CALLS: dict[str, list[tuple[str, ...]]] = {
    "hermes": [jsons(HERMES, between="\n")],
    "llama3_json": [jsons(LLAMA, between="; ")],
    "deepseek_v3": [jsons(V3, *SECTION, "\n")],
    "deepseek_v31": [jsons(V31, *SECTION)],
    "mistral": [
        jsons("[TOOL_CALLS]{}[ARGS]{}"),
        jsons(JSON, "[TOOL_CALLS] [", "]", ", "),
        jsons(JSON, "[TOOL_CALLS][", "]", ", "),
    ],
    "pythonic": [("[f(a=1)]", "[f(a=1), g()]", '[f(a="x")]')],
    "qwen3_coder": [xml("tool_call")],
    "seed_oss": [xml("seed:tool_call")],
    "granite": [jsons(JSON, "<|tool_call|>[", "]", ", ")],
    "": [jsons(JSON, between=", ")],
    "kimi_k2": [jsons(JSON, between=", ")],
}
CASES = [(parser, texts) for parser, found in CALLS.items() for texts in found]


@pytest.mark.parametrize(("parser", "texts"), CASES)
def test_a_required_call_is_enforced_and_read(parser: str, texts: tuple[str, ...]) -> None:
    model = ServedModel(100, parser)
    one, two, wrong = texts
    required = grammar_of(conversation(F, G, mode="required").constraint(model))
    named = grammar_of(conversation(F, G, mode="named", name="f").constraint(model))
    for grammar in (required, named):
        assert accepts(grammar, one)
        assert not accepts(grammar, "")
        assert not accepts(grammar, "Hello")
        assert not accepts(grammar, wrong)
        assert not accepts(grammar, one.replace("f", "other", 1))
    assert accepts(required, two)
    assert not accepts(named, two)
    output = conversation(F, G, mode="required").output_format(model)
    assert output is not None
    reader = output.parser()
    events = reader.feed(two) + reader.finish()
    assert [type(each).__name__ for each in events] == ["CallBegin", "CallArguments", "CallEnd"] * 2
    assert [each.json for each in events if isinstance(each, CallArguments)] == ['{"a": 1}', "{}"]


@pytest.mark.parametrize(("parser", "texts"), [case for case in CASES if case[0] in ENFORCED])
def test_strict_tools_are_enforced_where_a_call_begins(parser: str, texts: tuple[str, ...]) -> None:
    strict = Tool("f", parameters=SCHEMA, strict=True)
    model = ServedModel(100, parser)
    one, two, wrong = texts
    grammar = grammar_of(conversation(strict, Tool("g")).constraint(model))
    assert accepts(grammar, "Just words.")
    assert accepts(grammar, one)
    assert accepts(grammar, two)
    assert not accepts(grammar, wrong)
    if TOOL_FORMATS[parser].trigger in TOOL_FORMATS[parser].tags:
        assert accepts(grammar, f"Let me look.\n{two}")
        assert not accepts(grammar, f"Let me look.\n{wrong}")
    assert conversation(F).constraint(model) is None


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"minProperties": 3}, "has minProperties 3, which"),
        ({"properties": {"a": {"type": "wrong"}}}, "cannot be compiled: Invalid type: wrong"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "has keywords that"),
    ],
)
def test_an_error_about_a_schema_names_its_tool(
    parser: str, keywords: dict[str, Any], words: str
) -> None:
    bad = Tool("g", parameters={"type": "object", **keywords}, field="tools[1].function")
    constraint = conversation(F, bad, F, mode="required").constraint(ServedModel(100, parser))
    assert constraint is not None

    def check() -> None:
        check_size(constraint, 4096)
        compiled(constraint, BYTES)

    with pytest.raises(RequestError) as refused:
        check()
    assert refused.value.field == "tools[1].function.parameters"
    assert str(refused.value).startswith(f"tools[1].function.parameters {words}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
        {"anyOf": [{"type": "string"}, SCHEMA]},
        {"$ref": "#/$defs/S", "$defs": {"S": SCHEMA}},
        {"description": "anything"},
    ],
)
def test_arguments_are_an_object_even_if_the_schema_names_no_type(schema: dict[str, Any]) -> None:
    forced = conversation(Tool("f", parameters=schema), mode="required")
    grammar = grammar_of(forced.constraint(ServedModel(100, "hermes")))
    assert accepts(grammar, HERMES.format("f", '{"a": 1}'))
    for other in ("5", '"text"', "[]"):
        assert not accepts(grammar, HERMES.format("f", other))


def test_a_strict_tool_that_cannot_be_enforced_is_refused() -> None:
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}
    for parser, schema in (("kimi_k2", SCHEMA), ("qwen3_coder", pattern)):
        chat = conversation(Tool("f", parameters=schema, strict=True))
        with pytest.raises(RequestError) as refused:
            chat.constraint(ServedModel(100, parser))
        assert refused.value.field == "tools.strict"
        forced = conversation(Tool("f", parameters=schema), mode="required")
        output = forced.output_format(ServedModel(100, parser))
        assert output is not None
        assert output.tools == "json"


def test_an_answer_of_a_form_may_also_call() -> None:
    form = pb.StructuredOutput(
        json_schema='{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], '
        '"additionalProperties": false}',
        field_name="response_format.json_schema.schema",
    )
    for parser, [(one, _, _), *_] in CALLS.items():
        if parser not in ENFORCED:
            continue
        model = ServedModel(100, parser)
        if TOOL_FORMATS[parser].trigger != "{":
            grammar = grammar_of(conversation(F, G).constraint(model, form))
            assert accepts(grammar, '{"x": 1}')
            assert accepts(grammar, one)
            assert not accepts(grammar, '{"x": 2}')
            assert not accepts(grammar, "Just words.")
        forced = grammar_of(conversation(F, G, mode="required").constraint(model, form))
        assert not accepts(forced, '{"x": 1}')
        assert accepts(forced, one)
    for parser in ("kimi_k2", "llama3_json"):
        assert conversation(F).constraint(ServedModel(100, parser), form) is None
    with pytest.raises(RequestError, match="cannot be combined with tools"):
        conversation(G).constraint(ServedModel(100, "llama3_json"), form)
    regex = pb.StructuredOutput(regex="a", field_name="structured_outputs.regex")
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        conversation(G).constraint(ServedModel(100, "hermes"), regex)


def test_an_answer_in_a_channel_is_constrained_there() -> None:
    model = ServedModel(100, "harmony", "harmony")
    given = pb.StructuredOutput(json_object=True, field_name="response_format")
    final = "<|channel|>final<|message|>"
    for asked in (conversation(), conversation(F)):
        constraint = asked.constraint(model, given)
        assert constraint is not None
        assert (constraint.begin_after, constraint.WhichOneof("kind")) == (final, None)
    forced = conversation(F, mode="required")
    constraint, output = forced.constraint(model), forced.output_format(model)
    assert constraint is not None
    assert constraint.begin_after == final
    assert output is not None
    assert (output.tools, output.reasoning) == ("json", "harmony")
    assert {"<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"} <= {*output.tags}
    budget = conversation().reasoning_budget(model, 9)
    assert budget is not None
    assert (budget.begin, budget.end) == ("<|channel|>analysis<|message|>", "<|end|>")


def test_constraints_begin_after_the_reasoning() -> None:
    required = conversation(F, mode="required")
    constraint = required.constraint(THINKS)
    assert constraint is not None
    assert constraint.begin_after == "</think>"
    off = conversation(F, mode="required", variables={"enable_thinking": False})
    constraint = off.constraint(THINKS)
    assert constraint is not None
    assert constraint.begin_after == ""
    given = pb.StructuredOutput(json_object=True, field_name="response_format")
    merged = pb.StructuredOutput()
    merged.CopyFrom(given)
    added = Conversation(HELLO).constraint(THINKS, given)
    assert added is not None
    merged.MergeFrom(added)
    assert (merged.json_object, merged.begin_after) == (True, "</think>")
    assert Conversation(HELLO).constraint(ServedModel(100), given) is None


def test_an_assistant_without_content_says_nothing() -> None:
    """Templates get empty text, as in vLLM, to which they can add other text; null beside calls."""
    for given in ({}, {"content": None}, {"content": None, "tool_calls": []}):
        turn = Message.model_validate({"role": "assistant", **given}).to_turn("messages[0]")
        assert turn == Turn("assistant", "")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert calling.to_turn("messages[0]").content is None
