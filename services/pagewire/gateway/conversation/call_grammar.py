"""The grammar of tool calls in a format, in Lark."""

import re
from functools import cached_property
from typing import Any

from pagewire.gateway.conversation.arguments import Parameters, json_rule, quoted
from pagewire.gateway.conversation.python_arguments import python_rules
from pagewire.gateway.conversation.tagged_arguments import tagged_rules
from pagewire.gateway.conversation.tools import Tool
from pagewire.output_formats import CallFrame, ToolFormat
from pagewire.v1 import inference_pb2 as pb

# The maximum number of calls in a grammar if the request has no limit.
_MAX_CALLS = 64
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Names that parsers read without quotes.
_BARE_NAME = re.compile(r"[\w.\-/]+")


class CallGrammar:
    """Calls of `tools`, at most `limit`. With `strict_only`, other tools accept any object."""

    def __init__(
        self,
        spec: ToolFormat,
        tools: tuple[Tool, ...],
        limit: int | None,
        strict_only: bool = False,
    ) -> None:
        self._spec = spec
        self._tools = tools
        self._limit = _MAX_CALLS if limit is None else limit
        self._strict_only = strict_only
        self._tags = sorted(spec.tags, key=len, reverse=True)

    @property
    def is_possible(self) -> bool:
        """Whether the format has a grammar for these tools."""
        return self._arguments is not None

    @property
    def start_between_words(self) -> str:
        """The rule `start` for an answer with text, in which calls begin with the trigger."""
        trigger = f"text_to_tag_{self._tags.index(self._spec.trigger)}"
        sections, several = [], False
        for number, frame in enumerate(self._spec.frames):
            several |= not frame.begin
            pieces = self._pieces(frame.begin + frame.before)[1:]
            more = self._further_calls(number, frame) if frame.begin else ""
            sections.append(f"{' '.join(pieces)} body_{number} {more}")
        section = f"{trigger} ({' | '.join(sections)})"
        return f"start: ({section}){{0,{self._limit if several else 1}}} TEXT_TO_TAG"

    def constraint(self, start: str, field: str) -> pb.StructuredOutput:
        """A grammar that begins with the rule `start`, which may use the rule `calls`.

        Errors about the schema of a tool name the schema, others name `field`.
        """
        lines = [*start.split("\n"), *self._calls()]
        for number, frame in enumerate(self._spec.frames):
            lines += self._bodies(number, frame)
        parts = []
        for tool, rules in zip(self._tools, self._arguments or (), strict=False):
            parts.append(pb.GrammarPart(first_line=len(lines) + 1, field_name=tool.schema_field))
            lines += rules
        return pb.StructuredOutput(
            grammar="\n".join(lines) + "\n", field_name=field, tags=self._tags, parts=parts
        )

    @cached_property
    def _arguments(self) -> list[list[str]] | None:
        """For each tool its rule `arguments_0` and so on, and the rules that this one uses; None if
        one is not possible."""
        spec = self._spec
        rules: list[list[str]] = []
        for i, tool in enumerate(self._tools):
            if not all(frame.quoted or _BARE_NAME.fullmatch(tool.name) for frame in spec.frames):
                return None
            schema = tool.schema if tool.strict or not self._strict_only else _ANY_OBJECT
            rule = f"arguments_{i}"
            made: list[str] | None = [f"{rule}: {json_rule(schema)}"]
            if spec.tagged is not None or spec.python is not None:
                given, made = Parameters.of(schema), None
                if given is not None and spec.tagged is not None:
                    made = tagged_rules(rule, given, tool.argument_types(), spec.tagged)
                elif given is not None:
                    made = python_rules(rule, given)
            if made is None:
                return None
            rules.append(made)
        return rules if spec.frames else None

    def _calls(self) -> list[str]:
        """The rule `calls`: one section of at least one call."""
        sections = []
        for number, frame in enumerate(self._spec.frames):
            begin = " ".join(self._pieces(frame.begin + frame.before))
            sections.append(f"{begin} body_{number} {self._further_calls(number, frame)}")
        return [f"calls: {' | '.join(sections)}"]

    def _further_calls(self, number: int, frame: CallFrame) -> str:
        """The calls of a section after the first one, and its end."""
        between = " ".join(self._pieces(frame.separator + frame.before))
        further = f"({between} body_{number}){{0,{self._limit - 1}}}" if self._limit > 1 else ""
        return " ".join([further, *self._pieces(frame.close)])

    def _bodies(self, number: int, frame: CallFrame) -> list[str]:
        """The rules of a frame's calls, from the name on."""
        count = range(len(self._tools))
        lines = [f"body_{number}: {' | '.join(f'body_{number}_{i}' for i in count)}"]
        for i, tool in enumerate(self._tools):
            name = quoted(tool.name) if frame.quoted else tool.name
            before, after = self._pieces(name + frame.middle), self._pieces(frame.after)
            lines.append(f"body_{number}_{i}: {' '.join([*before, f'arguments_{i}', *after])}")
        return lines

    def _pieces(self, text: str) -> list[str]:
        """Terminals for a text: its tags, which may be single tokens, and the text between."""
        pattern = "|".join(map(re.escape, self._tags))
        found = re.split(f"({pattern})", text) if pattern else [text]
        tags = {tag: f"tag_{i}" for i, tag in enumerate(self._tags)}
        return [tags.get(piece) or quoted(piece) for piece in found if piece]
