"""/v1/chat/completions: the fields of a request, and the form of its answer."""

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, JsonValue, Tag, create_model

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import (
    Count,
    Effort,
    GenerationFields,
    Int32,
    NumLogprobs,
    Strict,
    string_or_array,
)
from pagewire.gateway.api.formatting import Envelope, ended_by, json_logprob
from pagewire.gateway.api.job import Job, ask_for_prompt, candidates
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.tool_fields import (
    MessageToolCalls,
    ToolChoiceField,
    ToolDefinitions,
    to_tool_choice,
)
from pagewire.gateway.api.unsupported import (
    CHAT,
    CHAT_HINTS,
    MESSAGE,
    MESSAGE_HINTS,
    PART,
    PART_HINTS,
)
from pagewire.gateway.conversation.conversation import Conversation, ReasoningOptions
from pagewire.gateway.conversation.tools import ToolOptions
from pagewire.gateway.conversation.turns import Turn
from pagewire.gateway.conversation.unread import unread_inputs
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs
from pagewire.gateway.generation.prompt_log import PromptWishes
from pagewire.gateway.models import ServedModel
from pagewire.limits import INT32_MAX, MAX_CHAT_TEMPLATE_BYTES
from pagewire.v1 import inference_pb2 as pb

PATH = "/v1/chat/completions"

# A message's role: the role in the chat template.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_UNSUPPORTED_ROLES = ("function",)
_UNSUPPORTED_PARTS = ("image_url", "input_audio", "audio_url", "video_url", "file", "refusal")
# One level of JSON needs three levels of protobuf, whose parsers stop at 100.
_MAX_KWARGS_DEPTH = 16


class ContentPart(Strict):
    """One part of a message; only text is supported."""

    hints = PART_HINTS
    refused = PART

    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<parts>")],
    string_or_array("content", "<parts>", "content parts"),
]


class Prediction(Strict):
    """The client's guess of the answer."""

    type: str
    content: Content

    def text(self) -> str:
        """The prediction as one text; RequestError for content other than text."""
        if self.type != "content":
            raise invalid(
                "prediction.type", f"prediction.type is {quoted(self.type)}; it must be 'content'"
            )
        if isinstance(self.content, str):
            return self.content
        parts = [
            _part_text(part, f"prediction.content[{i}]") for i, part in enumerate(self.content)
        ]
        return "".join(parts)


class Message(Strict):
    """One message of a conversation."""

    hints = MESSAGE_HINTS
    refused = MESSAGE

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: MessageToolCalls | None = None
    tool_call_id: str | None = None
    # The reasoning of an assistant's message; the two names mean the same.
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_turn(self, path: str) -> Turn:
        """The turn as the chat template gets it; RequestError for content other than text."""
        role = self._template_role(path)
        for field, owner in (
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
            ("reasoning", "assistant"),
            ("tool_call_id", "tool"),
        ):
            if getattr(self, field) and role != owner:
                raise invalid(
                    f"{path}.{field}", f"{path}.{field} belongs to messages of role {owner} only"
                )
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.reasoning is not None and self.reasoning != reasoning:
            raise invalid(
                f"{path}.reasoning",
                f"{path}.reasoning and {path}.reasoning_content differ; give one",
            )
        if self.content is None and role != "assistant":
            raise invalid(f"{path}.content", f"{path}.content is required")
        calls = self.tool_calls or ()
        # Templates expect null only beside calls; otherwise absent content is empty text.
        content = None if self.content is None and calls else self._text(self.content or "", path)
        return Turn(
            role,
            content,
            self.name,
            tuple(call.to_call(f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)),
            self.tool_call_id,
            reasoning,
        )

    def _template_role(self, path: str) -> str:
        if self.role in _UNSUPPORTED_ROLES:
            raise invalid(
                f"{path}.role",
                f"{path}.role is {self.role!r}, which is not supported; use tool_calls and the "
                "role tool",
            )
        if self.role not in _ROLES:
            known = ", ".join(_ROLES)
            raise invalid(
                f"{path}.role", f"{path}.role is {quoted(self.role)}; it must be one of {known}"
            )
        return _ROLES[self.role]

    @staticmethod
    def _text(content: str | list[ContentPart], path: str) -> str:
        if isinstance(content, str):
            return content
        return "\n".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


class ChatRequest(GenerationFields):
    """The body of a request; `GenerationFields` has the fields shared with other endpoints."""

    hints = CHAT_HINTS
    refused = CHAT

    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Annotated[list[dict[str, JsonValue]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    prediction: Prediction | None = None

    def job(self, model: str, served: ServedModel, limits: BodyLimits) -> Job:
        """The requests for the schedulers; RequestError names a field that is not valid."""
        self.check_stream_options()
        envelope = Envelope(
            "chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion", model
        )
        self.check_prompt_logprobs()
        wishes = PromptWishes(top=self.prompt_logprobs, ids=bool(self.return_token_ids))
        logprobs = self._wanted_logprobs()
        stop = self.stop_conditions(self.given_max_tokens(), wishes.needs_scheduler)
        conversation = self.conversation(limits)
        chat = self._chat_input(conversation, limits)
        output = conversation.output_format(served)
        constraint = conversation.constraint(served, self.wanted_output())
        request = self.candidate_fields(envelope.id, model, stop, logprobs)
        ask_for_prompt(request, wishes)
        parameters = self.common_parameters(stop)
        prompt = pb.GenerateRequest(
            model=model,
            cache_salt=self.cache_salt or "",
            chat=chat,
            visible_special_tokens=output.tags if output is not None else (),
            structured_output=constraint,
            reasoning_budget=conversation.reasoning_budget(served, self._thinking_budget()),
            prediction=None if self.prediction is None else self.prediction.text(),
            **self.input_options(),
        )
        n = self.num_choices()
        return Job(
            requests=candidates([request], n),
            common=[CommonFields.of(parameters, prompt, self.prompt_cache_key)],
            candidates=n,
            n=n,
            formatter=ChatFormatter(
                envelope,
                bool(self.return_tokens_as_token_ids),
                frozenset(self.stop_token_ids or ()),
            ),
            stream=bool(self.stream),
            include_usage=self.include_usage,
            shows_logprobs=logprobs is not None,
            request_id=self.request_id,
            details=self.details(prompt_in_choice=False),
            output=output,
            input_field="messages",
            limit_field=self.max_tokens_name,
            prompts=(wishes,) if wishes.needs_scheduler else (),
            max_prompt_logprobs=limits.max_prompt_logprobs,
            ignored=unread_inputs(
                conversation, served, constraint, self.chat_template_kwargs or ()
            ),
        )

    @property
    def max_tokens_name(self) -> str:
        """The name of the output's limit in errors: the one in the request."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def given_max_tokens(self) -> int | None:
        """The limit of the output; RequestError if its two names have different values."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid(
                "max_tokens",
                f"max_tokens is {old} and max_completion_tokens is {new}; give one",
            )
        return old if new is None else new

    def _thinking_budget(self) -> int | None:
        """The most tokens of reasoning; -1 stands for no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def _wanted_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs}, which needs logprobs: true; set it or "
                "remove top_logprobs",
            )
        return None

    def conversation(self, limits: BodyLimits) -> Conversation:
        """The conversation; RequestError names a field that is not valid."""
        kwargs = self.chat_template_kwargs or {}
        _check_variable("chat_template_kwargs", kwargs, limits)
        tools = self.tools or ()
        return Conversation(
            [message.to_turn(f"messages[{i}]") for i, message in enumerate(self.messages)],
            ToolOptions(
                tuple(tool.to_tool(f"tools[{i}]") for i, tool in enumerate(tools)),
                to_tool_choice(self.tool_choice),
                self.parallel_tool_calls is not False,
                self.max_tool_calls,
            ),
            ReasoningOptions(self.include_reasoning is not False, self.reasoning_effort),
            kwargs,
            self._adds_generation_prompt(),
            template=self.chat_template,
        )

    def rendering(
        self, served: ServedModel, limits: BodyLimits
    ) -> tuple[pb.ChatInput, tuple[str, ...]]:
        """The conversation for the chat template, and the inputs that it leaves out.

        RequestError names what is not valid.
        """
        conversation = self.conversation(limits)
        unread = unread_inputs(conversation, served, variables=self.chat_template_kwargs or ())
        return self._chat_input(conversation, limits), unread

    def _chat_input(self, conversation: Conversation, limits: BodyLimits) -> pb.ChatInput:
        chat = conversation.chat_input(limits.tools)
        chat.continue_final_message = bool(self.continue_final_message)
        if (template := self._template()) is not None:
            chat.chat_template = template
        if self.documents:
            _check_variable("documents", {"documents": [*self.documents]}, limits)
            for document in self.documents:
                chat.documents.add().update(document)
        return chat

    def _adds_generation_prompt(self) -> bool:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; give one",
            )
        return self.add_generation_prompt is not False and not self.continue_final_message

    def _template(self) -> str | None:
        if self.chat_template is not None:
            size = len(self.chat_template.encode())
            if size > MAX_CHAT_TEMPLATE_BYTES:
                raise invalid(
                    "chat_template",
                    f"chat_template has {size} bytes; shorten it to {MAX_CHAT_TEMPLATE_BYTES} at "
                    "most",
                )
        return self.chat_template


def _part_text(part: ContentPart, path: str) -> str:
    if part.type in _UNSUPPORTED_PARTS:
        raise invalid(
            f"{path}.type",
            f"{path}.type is {part.type!r}, which is not supported; send parts of type text",
        )
    if part.type != "text":
        raise invalid(f"{path}.type", f"{path}.type is {quoted(part.type)}; it must be text")
    if part.text is None:
        raise invalid(f"{path}.text", f"{path}.text is required")
    return part.text


def _check_variable(field: str, value: dict[str, JsonValue], limits: BodyLimits) -> None:
    """Refuses variables of the template that are too large, or that protobuf cannot carry."""
    _check_size(field, value, limits)
    _check_kwargs(field, value, _MAX_KWARGS_DEPTH)


def _check_size(field: str, kwargs: dict[str, JsonValue], limits: BodyLimits) -> None:
    nodes = 0
    waiting: list[dict[str, JsonValue] | list[JsonValue]] = [kwargs]
    while waiting:
        value = waiting.pop()
        nodes += len(value)
        if nodes > limits.max_template_nodes:
            raise invalid(
                field,
                f"{field} has more than {limits.max_template_nodes} values; send fewer, or raise "
                "--max-template-nodes",
            )
        items = value.values() if isinstance(value, dict) else value
        waiting += [item for item in items if isinstance(item, dict | list)]
    size = len(json.dumps(kwargs, ensure_ascii=False, separators=(",", ":")).encode())
    if size > limits.max_template_bytes:
        raise invalid(
            field,
            f"{field} has {size} bytes; at most {limits.max_template_bytes} are allowed: shorten "
            "it, or raise --max-template-bytes",
        )


def _check_kwargs(field: str, value: JsonValue, levels: int) -> None:
    """Refuses what protobuf cannot carry: NaN, infinity, large integers, deep nesting."""
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(field, f"{field} holds {value}; numbers must be finite")
    if isinstance(value, int) and abs(value) > 2**53:
        raise invalid(field, f"{field} holds an integer above 2^53; give it as a string")
    if isinstance(value, dict | list) and levels == 0:
        raise invalid(
            field, f"{field} is nested deeper than {_MAX_KWARGS_DEPTH} levels; flatten it"
        )
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_kwargs(field, item, levels - 1)


def chat_request_model(max_messages: int) -> type[ChatRequest]:
    """ChatRequest with a bound on messages, which is checked while they are being parsed."""
    messages = Annotated[list[Message], Field(fail_fast=True, max_length=max_messages)]
    return create_model("ChatRequest", __base__=ChatRequest, messages=(messages, ...))


@dataclass(frozen=True, slots=True)
class ChatFormatter:
    """Formats a choice as a message, or as deltas of one."""

    prompt_logprobs_in_choices: ClassVar[bool] = False

    envelope: Envelope
    tokens_as_ids: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def under(self, envelope: Envelope) -> "ChatFormatter":
        """The same formatter with another envelope."""
        return replace(self, envelope=envelope)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The delta with the role, which comes before any text."""
        return _chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A delta with text."""
        return _chunk(index, {"content": text})

    def delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """Any delta."""
        return _chunk(index, delta)

    def ending(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The last delta, with the finish reason."""
        chunk = _chunk(index, {"content": text} if text else {})
        return {**chunk, **ended_by(finish, self.stop_token_ids)}

    def whole(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The complete message."""
        return self.message(index, {"role": "assistant", "content": text, "refusal": None}, finish)

    def message(self, index: int, message: dict[str, Any], finish: pb.Finish) -> dict[str, Any]:
        """The choice with a complete message."""
        choice = {"index": index, "message": message, "logprobs": None}
        return {**choice, **ended_by(finish, self.stop_token_ids)}

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """One entry for each token, also for a stop token. A special token has its name as text."""
        content = [
            {**self._entry(each.token), "top_logprobs": list(map(self._entry, each.top))}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "token": candidate.name if self.tokens_as_ids else candidate.text,
            "logprob": json_logprob(candidate.logprob),
            "bytes": list(candidate.data),
        }


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
