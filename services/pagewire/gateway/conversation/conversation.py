"""A conversation, and what of its answer is reasoning and which are tool calls."""

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.struct_pb2 import Struct

from pagewire.errors import invalid
from pagewire.gateway.conversation.enforcement import enforced_format, structured_output
from pagewire.gateway.conversation.limits import ToolLimits
from pagewire.gateway.conversation.tools import ToolOptions
from pagewire.gateway.conversation.turns import Turn
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS
from pagewire.v1 import inference_pb2 as pb

# Variables of templates that turn reasoning on and off.
_THINKING = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """`included` False drops the reasoning from the answer. `effort` goes to the chat template."""

    included: bool = True
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is asked. `variables` are further variables of the chat template."""

    turns: list[Turn]
    tools: ToolOptions = field(default_factory=ToolOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    def chat_input(self, limits: ToolLimits) -> pb.ChatInput:
        """The scheduler's input; RequestError names a field that is not valid."""
        if not self.turns:
            raise invalid("messages", "messages is empty; give at least one")
        self.tools.check(limits)
        chat = pb.ChatInput(
            messages=[turn.to_proto() for turn in self.turns],
            add_generation_prompt=self.add_generation_prompt,
            tools=self.tools.to_text(),
        )
        calls = [message.tool_calls for message in chat.messages if message.tool_calls]
        if calls:
            nodes = sum(text.count(mark) for text in calls for mark in ",[{")
            limits.check("messages", sum(map(len, calls)), nodes)
        if variables := self._variables():
            struct = Struct()
            struct.update(variables)
            chat.template_kwargs.CopyFrom(struct)
        return chat

    def output_format(self, model: ServedModel) -> OutputFormat | None:
        """How the answer's text is read; None if all of it is content.

        RequestError for tools with a model whose format of calls is not known.
        """
        offered, forced = self.tools.offered, self.tools.forced
        tools = enforced_format(model.tool_parser) if forced else model.tool_parser
        if offered and tools not in TOOL_FORMATS:
            raise invalid(
                "tools",
                f"the format in which this model calls tools is {tools or 'not known'}; start its "
                "scheduler with --tool-parser, or send tool_choice: none",
            )
        reasoning = model.reasoning_parser if model.reasoning_parser in REASONING_FORMATS else ""
        if not offered and not reasoning:
            return None
        start = model.reasoning_start(self._thinking()) if self.add_generation_prompt else 0
        return OutputFormat(
            reasoning=reasoning,
            in_reasoning=start == pb.REASONING_START_IN_PROMPT,
            shows_reasoning=self.reasoning.included,
            reasoning_end_token=model.reasoning_end_token,
            tools=tools if offered else "",
            types={tool.name: tool.argument_types() for tool in offered},
            max_calls=self.tools.call_limit,
        )

    def structured_output(self, model: ServedModel) -> pb.StructuredOutput | None:
        """The grammar that enforces the choice of tools and strict tools; None if there is none."""
        if not self.tools.offered:
            return None
        reasons = model.reasoning_parser in REASONING_FORMATS and (
            model.reasoning_start(self._thinking()) != pb.REASONING_START_NONE
        )
        ends = REASONING_FORMATS[model.reasoning_parser].ends if reasons else ()
        return structured_output(self.tools, model.tool_parser, ends[0] if ends else "")

    def _thinking(self) -> bool | None:
        """Whether the request turns reasoning on or off; None if it says nothing."""
        given = self._variables()
        return next((given[name] for name in _THINKING if isinstance(given.get(name), bool)), None)

    def _variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort
        if effort is None:
            return self.variables
        off = dict.fromkeys(_THINKING, False) if effort == "none" else {}
        return {"reasoning_effort": effort, **off, **self.variables}
