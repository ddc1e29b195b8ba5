"""A conversation, and how to find reasoning and tool calls in its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.struct_pb2 import Struct

from pagewire.errors import invalid
from pagewire.gateway.conversation.enforcement import enforced_calls, enforced_format
from pagewire.gateway.conversation.limits import ToolLimits
from pagewire.gateway.conversation.tools import ToolOptions
from pagewire.gateway.conversation.turns import Turn
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS
from pagewire.v1 import inference_pb2 as pb

# Variables of templates that turn reasoning on and off.
THINKING = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """`included` False drops the reasoning from the answer. `effort` goes to the chat template."""

    included: bool = True
    effort: str | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template that stand for `effort`."""
        if self.effort is None:
            return {}
        off = dict.fromkeys(THINKING, False) if self.effort == "none" else {}
        return {"reasoning_effort": self.effort, **off}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of the model.

    `variables` are further variables of the chat template. `template` replaces the model's. Errors
    call the turns `input_field`. `names` are the client's names of inputs in pb.Model, where they
    differ.
    """

    turns: list[Turn]
    tools: ToolOptions = field(default_factory=ToolOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    input_field: str = "messages"
    template: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def chat_input(self, limits: ToolLimits) -> pb.ChatInput:
        """The scheduler's input; RequestError names a field that is not valid."""
        if not self.turns:
            raise invalid(self.input_field, f"{self.input_field} is empty; give at least one")
        self.tools.check(limits)
        chat = pb.ChatInput(
            messages=[turn.to_proto() for turn in self.turns],
            add_generation_prompt=self.add_generation_prompt,
            tools=self.tools.to_text(),
        )
        calls = [message.tool_calls for message in chat.messages if message.tool_calls]
        if calls:
            nodes = sum(text.count(mark) for text in calls for mark in ",[{")
            limits.check(self.input_field, sum(map(len, calls)), nodes)
        if variables := self._variables():
            struct = Struct()
            struct.update(variables)
            chat.template_kwargs.CopyFrom(struct)
        return chat

    def output_format(self, model: ServedModel) -> OutputFormat | None:
        """The format of the answer's text; None if all text is content.

        RequestError for tools if the model's format of calls is not known.
        """
        offered, forced = self.tools.offered, self.tools.forced
        tools = enforced_format(self.tools, model.tool_parser) if forced else model.tool_parser
        if offered and tools not in TOOL_FORMATS:
            raise invalid(
                "tools",
                f"the format in which this model calls tools is {tools or 'not known'}; start its "
                "scheduler with --tool-parser, or send tool_choice: none",
            )
        reasoning = model.reasoning_parser if model.reasoning_parser in REASONING_FORMATS else ""
        if not offered and not reasoning:
            return None
        start = self._reasoning_start(model) if self.add_generation_prompt else 0
        return OutputFormat(
            reasoning=reasoning,
            in_reasoning=start == pb.REASONING_START_IN_PROMPT,
            shows_reasoning=self.reasoning.included,
            reasoning_end_token=model.reasoning_end_token,
            tools=tools if offered else "",
            types={tool.name: tool.argument_types() for tool in offered},
            max_calls=self.tools.call_limit,
        )

    def constraint(
        self, model: ServedModel, given: pb.StructuredOutput | None = None
    ) -> pb.StructuredOutput | None:
        """A constraint on the answer, to be merged with `given`, the request's own constraint.

        It enforces the choice of tools and strict tools, allows calls beside a `given` form of the
        answer, and makes `given` begin after the reasoning. None if it adds nothing; RequestError
        if the two constraints exclude each other.
        """
        calls = enforced_calls(self.tools, model.tool_parser, given) if self.tools.offered else None
        begin_after = self._reasoning_end(model)
        if calls is not None:
            calls.begin_after = begin_after
            return calls
        return pb.StructuredOutput(begin_after=begin_after) if given and begin_after else None

    def reasoning_budget(
        self, model: ServedModel, max_tokens: int | None
    ) -> pb.ReasoningBudget | None:
        """The limit of the reasoning; RequestError for a model without a known reasoning format."""
        if max_tokens is None:
            return None
        spec = REASONING_FORMATS.get(model.reasoning_parser)
        if spec is None:
            field = "thinking_token_budget"
            raise invalid(
                field,
                f"{field} is {max_tokens}, and how this model reasons is not known; remove it, or "
                "start its scheduler with --reasoning-parser",
            )
        start = self._reasoning_start(model)
        if start == pb.REASONING_START_NONE or not self.add_generation_prompt:
            return None
        begin = "" if start == pb.REASONING_START_IN_PROMPT else spec.begins[0]
        return pb.ReasoningBudget(max_tokens=max_tokens, begin=begin, end=spec.ends[0])

    def _reasoning_end(self, model: ServedModel) -> str:
        """The tag after which the answer begins; empty if the model does not reason."""
        spec = REASONING_FORMATS.get(model.reasoning_parser)
        if spec is None or not self.add_generation_prompt:
            return ""
        start = self._reasoning_start(model)
        return "" if start == pb.REASONING_START_NONE else spec.answer or spec.ends[0]

    def _reasoning_start(self, model: ServedModel) -> int:
        """How reasoning begins. A request's template without the tag cannot open the reasoning."""
        start = model.reasoning_start(self.thinking())
        spec = REASONING_FORMATS.get(model.reasoning_parser)
        if self.template is None or spec is None or start != pb.REASONING_START_IN_PROMPT:
            return start
        opens = any(tag in self.template for tag in spec.begins)
        return start if opens else pb.REASONING_START_BY_MODEL

    def thinking(self) -> bool | None:
        """Whether the request turns reasoning on or off; None if it does neither."""
        given = self._variables()
        return next((given[name] for name in THINKING if isinstance(given.get(name), bool)), None)

    def _variables(self) -> dict[str, Any]:
        return {**self.reasoning.variables, **self.variables}
