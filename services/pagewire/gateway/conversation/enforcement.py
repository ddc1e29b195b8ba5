"""Grammars that make a model call tools, and give their arguments the form of their schemas."""

import json
import re
from typing import Any

from pagewire.errors import invalid
from pagewire.gateway.conversation.tools import Tool, ToolOptions
from pagewire.output_formats import TOOL_FORMATS, CallFrame
from pagewire.v1 import inference_pb2 as pb

# The most calls that a grammar lets a model make where the request has no limit.
_MAX_CALLS = 64
# As models write JSON. A model that may choose the white space can repeat it up to its token limit.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def enforced_format(tool_parser: str) -> str:
    """The format of calls that a grammar asks for: the model's own where that is possible."""
    own = TOOL_FORMATS.get(tool_parser)
    return tool_parser if own is not None and own.frame is not None else "json"


def enforced_calls(options: ToolOptions, tool_parser: str) -> pb.StructuredOutput | None:
    """The grammar for the choice of tools and for strict tools; None if nothing is enforced.

    RequestError for a strict tool of a model whose format of calls cannot be enforced.
    """
    if options.forced:
        frame = TOOL_FORMATS[enforced_format(tool_parser)].frame
        assert frame is not None
        grammar = _calls_grammar(options.forced, frame, options.call_limit, strict_only=False)
        return pb.StructuredOutput(grammar="start: calls\n" + grammar, field_name="tool_choice")
    strict = [tool for tool in options.offered if tool.strict]
    if not strict:
        return None
    spec = TOOL_FORMATS[tool_parser]
    if spec.frame is None:
        field = f"{strict[0].field}.strict"
        raise invalid(
            field,
            f"{field} is true, which cannot be enforced in this model's format of calls "
            f"({tool_parser}) while it may also answer in words; remove it, or send tool_choice: "
            "required",
        )
    if spec.bare:
        grammar = _calls_grammar(options.offered, spec.frame, options.call_limit, strict_only=True)
        words = f"[^{re.escape(spec.frame.trigger)}\\s]"
        start = f"start: calls | words\nwords: /\\s*{words}(.|\\n)*/\n"
        return pb.StructuredOutput(grammar=start + grammar, field_name="tools")
    tag = _structural_tag(options.offered, spec.frame)
    return pb.StructuredOutput(structural_tag=tag, field_name="tools")


def _calls_grammar(
    tools: tuple[Tool, ...], frame: CallFrame, limit: int | None, strict_only: bool
) -> str:
    """Rules in Lark for `calls`: one or more, at most `limit`."""
    more = (_MAX_CALLS if limit is None else limit) - 1
    lines = [
        f"calls: call ({_quoted(frame.separator)} call){{0,{more}}}" if more else "calls: call"
    ]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        begin, schema = _beginning(tool, frame), _schema(tool, strict_only)
        lines.append(f"call_{i}: {_quoted(begin)} arguments_{i} {_quoted(frame.end)}")
        spaced = {**schema, "x-guidance": _SPACING}
        lines.append(f"arguments_{i}: %json {json.dumps(spaced)}")
    return "\n".join(lines) + "\n"


def _structural_tag(tools: tuple[Tool, ...], frame: CallFrame) -> str:
    structures = [
        {"begin": _beginning(tool, frame), "schema": _schema(tool, True), "end": frame.end}
        for tool in tools
    ]
    return json.dumps(
        {"type": "structural_tag", "structures": structures, "triggers": [frame.trigger]}
    )


def _schema(tool: Tool, strict_only: bool) -> dict[str, Any]:
    return tool.schema if tool.strict or not strict_only else _ANY_OBJECT


def _beginning(tool: Tool, frame: CallFrame) -> str:
    return frame.begin + (json.dumps(tool.name) if frame.quoted else tool.name) + frame.middle


def _quoted(text: str) -> str:
    """The text as a terminal of Lark, whose strings have JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)
