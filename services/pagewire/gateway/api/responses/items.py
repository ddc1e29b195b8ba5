"""The input of a response: a text, or items that become the turns of a conversation."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pagewire.errors import RequestError, invalid, quoted
from pagewire.gateway.api.fields import Strict, string_or_array
from pagewire.gateway.api.responses.unsupported import CALL, ITEM_HINTS, PART_HINTS
from pagewire.gateway.conversation.turns import ToolCall, Turn

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Part(Strict):
    """A part of a message, of an output or of reasoning; only text is supported."""

    hints = PART_HINTS

    type: str
    text: str | None = None
    refusal: str | None = None

    def to_text(self, path: str) -> str:
        """Its text; RequestError for another kind of part."""
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        if self.type not in _TEXTS:
            raise invalid(
                f"{path}.type", f"{path}.type is {quoted(self.type)}; only text is supported"
            )
        if self.text is None:
            raise invalid(f"{path}.text", f"{path}.text is required")
        return self.text


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")],
    string_or_array("content", "<parts>", "parts"),
]


class MessageItem(Strict):
    """A message of the client, or of an earlier response."""

    hints = ITEM_HINTS

    type: Literal["message"] = "message"
    role: str
    content: Content


class CallItem(Strict):
    """A call that an earlier response made."""

    hints = ITEM_HINTS | {"caller"}
    refused = CALL

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(Strict):
    """What the function of a call returned."""

    hints = ITEM_HINTS | {"caller"}

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Strict):
    """The reasoning of an earlier response. It must have its text: Pagewire does not encrypt it."""

    hints = ITEM_HINTS

    type: Literal["reasoning"]
    summary: Annotated[list[Part], Field(fail_fast=True)] | None = None
    content: Annotated[list[Part], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None


class OtherItem(Strict):
    """An item of a type that is not supported."""

    type: str

    def refusal(self, path: str) -> RequestError:
        """The error that names the type."""
        reason = "supported are message, function_call, function_call_output and reasoning"
        if self.type == "item_reference":
            reason = "no response is stored; send the item itself"
        return invalid(f"{path}.type", f"{path}.type is {quoted(self.type)}; {reason}")


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    return f"<{kind}>" if kind in _KINDS else "<other>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(
        _item_kind, custom_error_type="item", custom_error_message="it must be an input item"
    ),
]


def turns_of(instructions: str | None, given: "str | list[Item]") -> list[Turn]:
    """The turns of a conversation; RequestError names an item that is not valid.

    Consecutive reasoning, a message and calls of the assistant are one turn.
    """
    turns = [] if instructions is None else [Turn("system", instructions)]
    if isinstance(given, str):
        return [*turns, Turn("user", given)]
    assistant = _Assistant()
    for index, item in enumerate(given):
        path = f"input[{index}]"
        if isinstance(item, ReasoningItem):
            turns += assistant.end_if_answered()
            assistant.reasoning.append(_reasoning(item, path))
        elif isinstance(item, CallItem):
            field = f"{path}.arguments"
            assistant.calls.append(ToolCall(item.call_id, item.name, item.arguments, field))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            turns += assistant.end_if_answered()
            assistant.content = _text(item.content, f"{path}.content")
        else:
            turns += assistant.end()
            turns.append(_turn(item, path))
    return [*turns, *assistant.end()]


class _Assistant:
    """The turn of the assistant that is being collected."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: str | None = None
        self.calls: list[ToolCall] = []

    def end_if_answered(self) -> list[Turn]:
        """Ends the turn if it has a text or calls: later reasoning or text begins another one."""
        return self.end() if self.content is not None or self.calls else []

    def end(self) -> list[Turn]:
        """Returns the turn, or nothing if it is empty, and begins the next one."""
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        turn = Turn("assistant", self.content, None, tuple(self.calls), None, reasoning)
        there = reasoning is not None or self.content is not None or self.calls
        self.reasoning, self.content, self.calls = [], None, []
        return [turn] if there else []


def _turn(item: Any, path: str) -> Turn:
    if isinstance(item, OtherItem):
        raise item.refusal(path)
    if isinstance(item, OutputItem):
        text = _text(item.output, f"{path}.output")
        return Turn("tool", text, tool_call_id=item.call_id)
    assert isinstance(item, MessageItem)
    if item.role not in _ROLES:
        raise invalid(
            f"{path}.role",
            f"{path}.role is {quoted(item.role)}; it must be one of {', '.join(_ROLES)}",
        )
    return Turn(_ROLES[item.role], _text(item.content, f"{path}.content"))


def _text(content: str | list[Part], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.to_text(f"{path}[{i}]") for i, part in enumerate(content))


def _reasoning(item: ReasoningItem, path: str) -> str:
    if item.content:
        return _text(item.content, f"{path}.content")
    if item.summary:
        return _text(item.summary, f"{path}.summary")
    if item.encrypted_content:
        raise invalid(
            f"{path}.encrypted_content",
            f"{path} has encrypted reasoning of another server; remove the item",
        )
    return ""
