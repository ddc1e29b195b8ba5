"""The body of a request to /v1/responses."""

from typing import Annotated, Any

from pydantic import Field, JsonValue, Tag, create_model

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.conversation_job import conversation_job
from pagewire.gateway.api.events import members
from pagewire.gateway.api.fields import (
    Count,
    Effort,
    GenerationFields,
    NumLogprobs,
    Strict,
    string_or_array,
)
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.responses.events import ResponseForm
from pagewire.gateway.api.responses.items import Item, turns_of
from pagewire.gateway.api.responses.response import ResponseHead
from pagewire.gateway.api.responses.tools import (
    ChoiceObject,
    ToolChoiceField,
    ToolDefinitions,
    tool_options,
)
from pagewire.gateway.api.responses.unsupported import (
    REASONING_HINTS,
    RESPONSE,
    RESPONSE_HINTS,
    TEXT_HINTS,
)
from pagewire.gateway.api.structured import json_output
from pagewire.gateway.conversation.conversation import Conversation, ReasoningOptions
from pagewire.gateway.models import ServedModel
from pagewire.v1 import inference_pb2 as pb

PATH = "/v1/responses"

# Accepted values of `include` that need no work: this server has no such tools, and its reasoning
# is not encrypted.
_INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Adds the log probabilities of the message's tokens.
_LOGPROBS = "message.output_text.logprobs"
# Names of inputs of the chat template.
_NAMES = {
    "messages[role=tool]": "input[type=function_call_output]",
    "messages[].tool_calls": "input[type=function_call]",
    "messages[].reasoning_content": "input[type=reasoning]",
    "reasoning_effort": "reasoning.effort",
}
_STORED = "no response is stored here; "


class TextFormat(Strict):
    """The form of the answer's text."""

    type: str
    name: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Strict):
    """Options of the answer's text."""

    hints = TEXT_HINTS

    format: TextFormat | None = None


class ReasoningFields(Strict):
    """Options of reasoning."""

    hints = REASONING_HINTS

    effort: Effort | None = None


def input_type(max_items: int | None = None) -> Any:
    """The type of `input`, with a bound on its items that is checked while they are parsed."""
    items = Annotated[list[Item], Field(fail_fast=True, max_length=max_items), Tag("<items>")]
    return Annotated[
        Annotated[str, Tag("<string>")] | items,
        string_or_array("input", "<items>", "items"),
    ]


class ResponsesRequest(GenerationFields):
    """The body of a request; `GenerationFields` has the fields shared with chat."""

    hints = RESPONSE_HINTS
    refused = RESPONSE

    input: input_type()  # type: ignore[valid-type]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningFields | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: JsonValue = None
    metadata: dict[str, str] | None = None

    @property
    def max_tokens_name(self) -> str:
        """The name of the output's limit in errors."""
        return "max_output_tokens"

    def given_max_tokens(self) -> int | None:
        """The limit of the output."""
        return self.max_output_tokens

    def check(self) -> None:
        """RequestError for fields that need state between requests, or are not implemented."""
        if self.previous_response_id is not None:
            raise invalid(
                "previous_response_id",
                f"previous_response_id is {quoted(self.previous_response_id)}; {_STORED}send the "
                "items of the earlier response in input",
            )
        if self.store:
            raise invalid("store", f"store is true; {_STORED}leave it out or set it to false")
        if self.background:
            raise invalid("background", f"background is true; {_STORED}wait for the answer")
        if self.conversation is not None:
            raise invalid(
                "conversation", f"conversation is given; {_STORED}send its items in input"
            )
        if self.truncation not in (None, "disabled"):
            raise invalid(
                "truncation",
                f"truncation is {quoted(self.truncation)}; only disabled is supported: leave out "
                "the items that the model need not know",
            )
        for index, name in enumerate(self.include or ()):
            if name not in (*_INCLUDABLE, _LOGPROBS):
                raise invalid(f"include[{index}]", f"include[{index}] is {quoted(name)}; remove it")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise invalid(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs}, which needs {_LOGPROBS} in include; add it",
            )
        if self.n not in (None, 1):
            raise invalid("n", f"n is {self.n}; a response has one output")
        if self.max_tokens is not None:
            raise invalid("max_tokens", "max_tokens is given; its name here is max_output_tokens")
        if self.stream_options is not None and self.stream_options.include_usage:
            raise invalid(
                "stream_options.include_usage",
                "a response always has its usage; remove stream_options.include_usage",
            )

    def to_conversation(self) -> Conversation:
        """The conversation; RequestError names a field that is not valid."""
        reasoning = ReasoningOptions(effort=self.reasoning.effort if self.reasoning else None)
        options = tool_options(
            self.tools or [],
            self.tool_choice,
            self.parallel_tool_calls is not False,
            self.max_tool_calls,
        )
        turns = turns_of(self.instructions, self.input)
        if not turns:
            raise invalid("input", "input is empty; give at least one item")
        system = "input[role=system]" if self.instructions is None else "instructions"
        names = {**_NAMES, "messages[role=system]": system}
        return Conversation(turns, options, reasoning, input_field="input", names=names)

    def repeated(self, model: str) -> str:
        """The fields of the response that repeat the request, as JSON without braces."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        choice: Any = "auto" if self.tool_choice is None else self.tool_choice
        if isinstance(choice, ChoiceObject):
            choice = choice.model_dump(exclude_unset=True)
        text = {"format": {"type": "text"}}
        if self.text is not None and self.text.format is not None:
            text = {"format": self.text.format.model_dump(by_alias=True, exclude_unset=True)}
        extra = self.model_extra or {}
        return members(
            {
                "model": model,
                "instructions": self.instructions,
                "background": False,
                "max_output_tokens": self.max_output_tokens,
                "max_tool_calls": self.max_tool_calls,
                "metadata": self.metadata or {},
                "parallel_tool_calls": self.parallel_tool_calls is not False,
                "previous_response_id": None,
                "prompt_cache_key": self.prompt_cache_key,
                "reasoning": {
                    "effort": self.reasoning.effort if self.reasoning else None,
                    "summary": None,
                },
                "safety_identifier": extra.get("safety_identifier"),
                "service_tier": "default",
                "store": False,
                "temperature": self.temperature,
                "text": text,
                "tool_choice": choice,
                "tools": [{**tool, "strict": bool(tool.get("strict"))} for tool in tools],
                "top_logprobs": self.top_logprobs or 0,
                "top_p": self.top_p,
                "truncation": "disabled",
                "user": extra.get("user"),
            }
        )

    def wanted_output(self) -> pb.StructuredOutput | None:
        """The constraint on the text, from `text.format`."""
        given = self.text.format if self.text is not None else None
        if self.response_format is not None:
            raise invalid(
                "response_format", "response_format is given; its name here is text.format"
            )
        if given is not None and given.type != "json_schema" and given.schema_ is not None:
            raise invalid("text.format.schema", "text.format.schema needs type json_schema")
        if given is None or given.type == "text":
            return super().wanted_output()
        if given.type == "json_schema" and given.schema_ is None:
            raise invalid("text.format.schema", "text.format.schema is required with json_schema")
        if given.type not in ("json_object", "json_schema"):
            raise invalid(
                "text.format.type",
                f"text.format.type is {quoted(given.type)}; it must be text, json_object or "
                "json_schema",
            )
        schema = given.schema_ if given.type == "json_schema" else None
        return json_output(self, "text.format", schema)

    def job(self, model: str, served: ServedModel, limits: BodyLimits) -> Job:
        """The request for a scheduler; RequestError names a field that is not valid."""
        self.check()
        head = ResponseHead(self.repeated(model))
        return conversation_job(
            self,
            self.to_conversation(),
            lambda output: ResponseForm(head, output is not None and output.short_ids),
            model=model,
            served=served,
            limits=limits,
            max_tokens=self.max_output_tokens,
            logprobs=self.top_logprobs or 0 if _LOGPROBS in (self.include or ()) else None,
        )


def responses_request_model(max_items: int) -> type[ResponsesRequest]:
    """ResponsesRequest with a bound on the items of its input."""
    return create_model(
        "ResponsesRequest", __base__=ResponsesRequest, input=(input_type(max_items), ...)
    )
