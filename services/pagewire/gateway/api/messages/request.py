"""The body of a request to /v1/messages, or to count its tokens."""

from typing import Annotated, Any

from pydantic import Field, JsonValue, Tag, create_model

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.conversation_job import checked_parameters, conversation_job
from pagewire.gateway.api.fields import Effort, GenerationFields, Strict, string_or_array
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.messages.blocks import Message, TextBlock, text_of, turns_of
from pagewire.gateway.api.messages.errors import ROOT
from pagewire.gateway.api.messages.events import MessageForm
from pagewire.gateway.api.messages.tools import ToolChoiceField, ToolDefinitions, tool_options
from pagewire.gateway.api.messages.unsupported import (
    MESSAGES,
    MESSAGES_HINTS,
    OUTPUT_CONFIG,
    THINKING_HINTS,
)
from pagewire.gateway.api.structured import json_output
from pagewire.gateway.api.tokenization import TextCall
from pagewire.gateway.conversation.conversation import THINKING, Conversation, ReasoningOptions
from pagewire.gateway.conversation.unread import unread_inputs
from pagewire.gateway.models import ServedModel
from pagewire.v1 import inference_pb2 as pb

PATH = ROOT
COUNT_PATH = f"{ROOT}/count_tokens"

_THINKING_TYPES = ("enabled", "adaptive", "disabled")
# Names of inputs of the chat template.
_NAMES = {
    "messages[role=system]": "system",
    "messages[role=tool]": "messages[].content[type=tool_result]",
    "messages[].tool_calls": "messages[].content[type=tool_use]",
    "messages[].reasoning_content": "messages[].content[type=thinking]",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
}


class Thinking(Strict):
    """Whether the model thinks before it answers.

    `budget_tokens` is a target in Anthropic's API, not a limit, and has no effect here.
    """

    hints = THINKING_HINTS

    type: str
    budget_tokens: int | None = None


class OutputFormat(Strict):
    """The form of the answer's text."""

    type: str
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None


class OutputConfig(Strict):
    """How much work goes into an answer, and its form."""

    refused = OUTPUT_CONFIG

    effort: Effort | None = None
    format: OutputFormat | None = None


System = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<blocks>")],
    string_or_array("system", "<blocks>", "text blocks"),
]
Messages = Annotated[list[Message], Field(fail_fast=True)]


class MessagesRequest(GenerationFields):
    """The body of a request; `GenerationFields` has the fields shared with chat."""

    hints = MESSAGES_HINTS
    refused = MESSAGES
    stop_name = "stop_sequences"

    messages: Messages
    system: System | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def wanted_output(self) -> pb.StructuredOutput | None:
        """The constraint on the text, from `output_config.format`."""
        given = self.output_config.format if self.output_config is not None else None
        if given is None:
            return super().wanted_output()
        field = "output_config.format"
        if given.type != "json_schema":
            raise invalid(
                f"{field}.type",
                f"{field}.type is {quoted(given.type)}; it must be json_schema",
            )
        if given.schema_ is None:
            raise invalid(f"{field}.schema", f"{field}.schema is required")
        return json_output(self, field, given.schema_)

    def given_max_tokens(self) -> int | None:
        """The limit of the output."""
        return self.max_tokens

    def to_conversation(self) -> Conversation:
        """The conversation; RequestError names a field that is not valid."""
        if not self.messages:
            raise invalid("messages", "messages is empty; give at least one")
        system = None if self.system is None else text_of(self.system, "system")
        turns = turns_of(system, self.messages)
        if self.continues and turns[-1].tool_calls:
            field = f"messages[{len(self.messages) - 1}].content"
            raise invalid(
                field,
                f"{field} has a tool_use, which cannot be continued; send its tool_result in a "
                "message of the user",
            )
        thinks = self._thinks()
        effort = None if self.output_config is None else self.output_config.effort
        variables: dict[str, Any] = dict.fromkeys(THINKING, thinks)
        return Conversation(
            turns,
            tool_options(self.tools or [], self.tool_choice),
            ReasoningOptions(included=thinks, effort=effort),
            variables,
            add_generation_prompt=not self.continues,
            names=_NAMES,
        )

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's, so that the answer continues it."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def job(self, model: str, served: ServedModel, limits: BodyLimits) -> Job:
        """The request for a scheduler; RequestError names a field that is not valid."""
        if self.max_tokens is None:
            raise invalid("max_tokens", "max_tokens is required")
        fields = self.checked_stop()
        return conversation_job(
            fields,
            self.to_conversation(),
            lambda _: MessageForm(model),
            model=model,
            served=served,
            limits=limits,
            max_tokens=self.max_tokens,
            continues=self.continues,
        )

    def count(self, model: str, served: ServedModel, limits: BodyLimits) -> TextCall:
        """The call that counts the tokens of the prompt.

        RequestError as for an answer, whose max_tokens it does not need.
        """
        for field in ("truncate_prompt_tokens", "truncation_side"):
            if getattr(self, field) is not None:
                raise invalid(
                    field, f"{field} has no effect on the count of the whole prompt; remove it"
                )
        checked_parameters(self.checked_stop(), self.max_tokens)
        conversation = self.to_conversation()
        chat = conversation.chat_input(limits.tools)
        chat.continue_final_message = self.continues
        request = pb.TokenizeRequest(model=model, chat=chat)
        if self.add_special_tokens is not None:
            request.add_special_tokens = self.add_special_tokens
        ignored = unread_inputs(conversation, served)
        return TextCall("Tokenize", model, request.SerializeToString(), "count", ignored)

    def _thinks(self) -> bool:
        """Whether thinking is asked for; it is off by default, as in Anthropic's API."""
        if self.thinking is None:
            return False
        if self.thinking.type not in _THINKING_TYPES:
            known = ", ".join(_THINKING_TYPES)
            raise invalid(
                "thinking.type",
                f"thinking.type is {quoted(self.thinking.type)}; it must be one of {known}",
            )
        return self.thinking.type != "disabled"

    def checked_stop(self) -> "MessagesRequest":
        """The request with its stop sequences in the field that `GenerationFields` reads."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise invalid("max_tokens", f"max_tokens is {self.max_tokens}; it must be at least 1")
        for field, remedy in (
            ("stop", "its name here is stop_sequences"),
            ("n", "an answer is one message"),
            ("stream_options", "a stream always has its usage"),
        ):
            if getattr(self, field) not in (None, 1):
                raise invalid(field, f"{field} is given; {remedy}")
        return self.model_copy(update={"stop": self.stop_sequences})


def messages_request_model(max_messages: int) -> type[MessagesRequest]:
    """MessagesRequest with a bound on messages, which is checked while they are being parsed."""
    messages = Annotated[list[Message], Field(fail_fast=True, max_length=max_messages)]
    return create_model("MessagesRequest", __base__=MessagesRequest, messages=(messages, ...))
