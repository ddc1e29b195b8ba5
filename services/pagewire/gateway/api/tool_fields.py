"""Tools and tool calls in the body of a chat request."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, JsonValue, Tag

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import Strict
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolMode
from pagewire.gateway.conversation.turns import ToolCall

_MODES: dict[str, ToolMode] = {"auto": "auto", "none": "none", "required": "required"}


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A tool; only functions are supported."""

    type: str
    function: FunctionDefinition | None = None

    def to_tool(self, path: str) -> Tool:
        """The tool, named `path` in errors."""
        _check_type(self.type, path)
        if self.function is None:
            raise invalid(f"{path}.function", f"{path}.function is required")
        function = self.function
        return Tool(
            function.name,
            function.description,
            function.parameters,
            bool(function.strict),
            f"{path}.function",
        )


class FunctionName(Strict):
    """Names a function."""

    name: str


class NamedToolChoice(Strict):
    """A tool that the model must call."""

    type: str
    function: FunctionName | None = None


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    return "<object>" if isinstance(value, dict | NamedToolChoice) else None


ToolChoiceField = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="it must be auto, none, required, or an object that names a function",
    ),
]


def to_tool_choice(given: str | NamedToolChoice | None) -> ToolChoice:
    """The choice; RequestError for one that does not exist."""
    if isinstance(given, NamedToolChoice):
        _check_type(given.type, "tool_choice")
        if given.function is None:
            raise invalid("tool_choice.function", "tool_choice.function is required")
        return ToolChoice("named", given.function.name)
    if given is None:
        return ToolChoice()
    if given not in _MODES:
        raise invalid(
            "tool_choice",
            f"tool_choice is {quoted(given)}; it must be one of {', '.join(_MODES)}, or an object "
            "that names a function",
        )
    return ToolChoice(_MODES[given])


class FunctionCall(Strict):
    """The function of a call; `arguments` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(Strict):
    """A call in an assistant's message."""

    hints = frozenset({"index"})  # clients that collect a stream may keep it

    id: str
    type: str | None = None
    function: FunctionCall | None = None  # needed; optional so that another type is named first

    def to_call(self, path: str) -> ToolCall:
        """The call, named `path` in errors."""
        if self.type is not None:
            _check_type(self.type, path)
        function = self.function
        if function is None:
            raise invalid(f"{path}.function", f"{path}.function is required")
        return ToolCall(self.id, function.name, function.arguments, f"{path}.function.arguments")


ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True)]
MessageToolCalls = Annotated[list[MessageToolCall], Field(fail_fast=True)]


def _check_type(given: str, path: str) -> None:
    if given != "function":
        raise invalid(f"{path}.type", f"{path}.type is {quoted(given)}; only function is supported")
