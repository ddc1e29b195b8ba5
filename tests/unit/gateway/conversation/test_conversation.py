"""From a conversation to a scheduler's input, the format of its answer, and its grammar."""

import json
from typing import Any

import llguidance
import pytest

from pagewire.errors import RequestError
from pagewire.gateway.conversation.conversation import Conversation, ReasoningOptions
from pagewire.gateway.conversation.limits import ToolLimits
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolOptions
from pagewire.gateway.conversation.turns import ToolCall, Turn
from pagewire.gateway.models import ServedModel
from pagewire.output_formats import TOOL_FORMATS
from pagewire.v1 import inference_pb2 as pb

LIMITS = ToolLimits()
HELLO = [Turn("user", "Hello")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
F = Tool("f", "does", SCHEMA)
G = Tool("g", strict=True)
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


def grammar_of(constraint: pb.StructuredOutput | None) -> str:
    """The constraint as llguidance takes it."""
    assert constraint is not None
    if constraint.WhichOneof("kind") == "structural_tag":
        tag = json.loads(constraint.structural_tag)
        tags = [
            llguidance.StructTag(
                trigger=tag["triggers"][0],
                begin=each["begin"],
                grammar=each["schema"],
                end=each["end"],
            )
            for each in tag["structures"]
        ]
        return llguidance.StructTag.to_grammar(tags, assume_special=False)
    return constraint.grammar


def accepts(grammar: str, text: str) -> bool:
    """Whether a text, by bytes, is a whole output that the grammar allows."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LLAMA = '{{"name": "{}", "parameters": {}}}'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
JSON = '{{"name": "{}", "arguments": {}}}'


@pytest.mark.parametrize(
    ("parser", "call", "between"),
    [
        ("hermes", HERMES, "\n"),
        ("llama3_json", LLAMA, "; "),
        ("deepseek_v31", DEEPSEEK, ""),
        ("mistral", JSON, ", "),
        ("pythonic", JSON, ", "),
        ("", JSON, ", "),
    ],
)
def test_a_required_call_is_enforced_and_read(parser: str, call: str, between: str) -> None:
    model = ServedModel(100, parser)
    one = call.format("f", '{"a": 1}')
    required = grammar_of(conversation(F, G, mode="required").constraint(model))
    named = grammar_of(conversation(F, G, mode="named", name="f").constraint(model))
    for grammar in (required, named):
        assert accepts(grammar, one)
        assert not accepts(grammar, "")
        assert not accepts(grammar, "Hello")
        assert not accepts(grammar, call.format("f", '{"a": "x"}'))
        assert not accepts(grammar, call.format("other", "{}"))
    two = one + between + call.format("g", "{}")
    assert accepts(required, two)
    assert not accepts(named, two)
    output = conversation(F, G, mode="required").output_format(model)
    assert output is not None
    reader = output.parser()
    events = reader.feed(two) + reader.finish()
    assert [type(each).__name__ for each in events] == ["CallBegin", "CallArguments", "CallEnd"] * 2


def test_strict_tools_are_enforced_where_a_call_begins() -> None:
    strict = Tool("f", parameters=SCHEMA, strict=True)
    for parser, call in (("hermes", HERMES), ("llama3_json", LLAMA), ("deepseek_v31", DEEPSEEK)):
        grammar = grammar_of(conversation(strict).constraint(ServedModel(100, parser)))
        assert accepts(grammar, "Just words."), parser
        assert accepts(grammar, call.format("f", '{"a": 1}')), parser
        assert not accepts(grammar, call.format("f", '{"a": "x"}')), parser
        assert not accepts(grammar, call.format("g", "{}")), parser
    assert conversation(F).constraint(ServedModel(100, "hermes")) is None
    with pytest.raises(RequestError) as refused:
        conversation(strict).constraint(ServedModel(100, "pythonic"))
    assert refused.value.field == "tools.strict"


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
    with pytest.raises(RequestError) as refused:
        required.constraint(THINKS, given)
    assert refused.value.field == "response_format"


def test_frames_are_in_the_language_of_their_format() -> None:
    assert {name for name, spec in TOOL_FORMATS.items() if spec.frame} == {
        "hermes",
        "llama3_json",
        "deepseek_v3",
        "deepseek_v31",
        "json",
    }
