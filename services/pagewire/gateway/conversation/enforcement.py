"""Grammars that make a model call tools, or restrict the form of its calls."""

import json
import re

from pagewire.errors import RequestError, invalid
from pagewire.gateway.conversation.arguments import json_rule
from pagewire.gateway.conversation.call_grammar import CallGrammar
from pagewire.gateway.conversation.tools import ToolOptions
from pagewire.output_formats import TOOL_FORMATS
from pagewire.v1 import inference_pb2 as pb

# Fields that constrain an answer in text, but not tool calls.
_OF_WORDS = ("response_format", "text.format", "output_config.format")


def enforced_format(options: ToolOptions, tool_parser: str) -> str:
    """The format of forced calls: the model's own if a grammar can describe them, else JSON."""
    return _forced(options, tool_parser)[0]


def enforced_calls(
    options: ToolOptions, tool_parser: str, answer: pb.StructuredOutput | None = None
) -> pb.StructuredOutput | None:
    """The grammar for the choice of tools and for strict tools; None if nothing is enforced.

    `answer` is the request's own constraint on its answer, if any. RequestError for a strict tool
    that cannot be enforced, and for an answer that excludes calls.
    """
    if options.forced:
        _, calls = _forced(options, tool_parser)
        if answer is not None and not _is_of_words(answer):
            raise _excluded(answer, "tool_choice")
        return calls.constraint("start: calls", "tools")
    strict = [tool for tool in options.offered if tool.strict]
    spec = TOOL_FORMATS[tool_parser]
    calls = CallGrammar(spec, options.offered, options.call_limit, strict_only=True)
    # If calls are JSON objects too, calls and answers cannot be distinguished.
    beside = answer is not None and _is_of_words(answer) and spec.trigger != "{"
    if not strict and not (beside and calls.is_possible):
        return None
    if answer is not None and not beside:
        raise _excluded(answer, "tools")
    if not calls.is_possible:
        field = f"{strict[0].field}.strict"
        raise invalid(
            field,
            f"{field} is true, which cannot be enforced for these tools in this model's format of "
            f"calls ({tool_parser}) while it may also answer in words; remove it, or let "
            "tool_choice ask for a call",
        )
    if answer is not None:
        return calls.constraint(f"start: calls | {_json_of(answer)}", answer.field_name)
    if spec.trigger in spec.tags:
        return calls.constraint(calls.start_between_words, "tools")
    words_of = f"[^{re.escape(spec.trigger)}\\s]"
    return calls.constraint(f"start: calls | words\nwords: /\\s*{words_of}(.|\\n)*/", "tools")


def _forced(options: ToolOptions, tool_parser: str) -> tuple[str, CallGrammar]:
    """The format of forced calls, and their grammar."""
    spec = TOOL_FORMATS.get(tool_parser)
    if spec is not None:
        calls = CallGrammar(spec, options.forced, options.call_limit)
        if calls.is_possible:
            return tool_parser, calls
    return "json", CallGrammar(TOOL_FORMATS["json"], options.forced, options.call_limit)


def _is_of_words(answer: pb.StructuredOutput) -> bool:
    """Whether this constrains an answer in text to JSON."""
    kind = answer.WhichOneof("kind")
    plain = kind in ("json_schema", "json_object") and not answer.whitespace_pattern
    return plain and answer.field_name.startswith(_OF_WORDS)


def _json_of(answer: pb.StructuredOutput) -> str:
    schema = {"type": "object"} if answer.json_object else json.loads(answer.json_schema)
    return json_rule(schema)


def _excluded(answer: pb.StructuredOutput, field: str) -> RequestError:
    name = answer.field_name
    return invalid(name, f"{name} cannot be combined with {field}; give one of them")
