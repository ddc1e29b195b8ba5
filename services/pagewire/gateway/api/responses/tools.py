"""The tools of a response, and which of them the model may or must call."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, JsonValue, Tag

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import Strict
from pagewire.gateway.api.responses.unsupported import FUNCTION, FUNCTION_HINTS
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolMode, ToolOptions

_MODES: dict[str, ToolMode] = {"auto": "auto", "none": "none", "required": "required"}


class ToolDefinition(Strict):
    """A tool; only functions are supported."""

    hints = FUNCTION_HINTS
    refused = FUNCTION

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    def to_tool(self, path: str) -> Tool:
        """The tool, named `path` in errors."""
        if self.type != "function":
            raise invalid(
                f"{path}.type",
                f"{path}.type is {quoted(self.type)}; only function is supported: this server runs "
                "no tools of its own",
            )
        if self.name is None:
            raise invalid(f"{path}.name", f"{path}.name is required")
        return Tool(self.name, self.description, self.parameters, bool(self.strict), path)


class ChosenTool(Strict):
    """A tool that a choice names."""

    type: str
    name: str | None = None


class ChoiceObject(ChosenTool):
    """One tool that the model must call, or several that it may or must choose from."""

    mode: str | None = None
    tools: Annotated[list[ChosenTool], Field(fail_fast=True)] | None = None


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    return "<object>" if isinstance(value, dict) else None


ToolChoiceField = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[ChoiceObject, Tag("<object>")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="it must be auto, none, required, or an object",
    ),
]
ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True)]


def tool_options(
    tools: list[ToolDefinition],
    choice: str | ChoiceObject | None,
    parallel: bool,
    max_calls: int | None,
) -> ToolOptions:
    """The tools and the choice among them; RequestError names a field that is not valid."""
    given = tuple(tool.to_tool(f"tools[{i}]") for i, tool in enumerate(tools))
    if isinstance(choice, ChoiceObject):
        _check_fields(choice)
        if choice.type == "allowed_tools":
            mode = _mode(choice.mode or "auto", "tool_choice.mode")
            return ToolOptions(_allowed(given, choice), ToolChoice(mode), parallel, max_calls)
        if choice.type != "function":
            raise _unknown_type("tool_choice", choice.type)
        if choice.name is None:
            raise invalid("tool_choice.name", "tool_choice.name is required")
        return ToolOptions(given, ToolChoice("named", choice.name), parallel, max_calls)
    wanted = _mode("auto" if choice is None else choice, "tool_choice")
    return ToolOptions(given, ToolChoice(wanted), parallel, max_calls)


def _check_fields(choice: ChoiceObject) -> None:
    """RequestError for a field of another type of choice, and without the allowed tools."""
    several = choice.type == "allowed_tools"
    for name in ("name",) if several else ("mode", "tools"):
        if getattr(choice, name) is not None:
            field, owner = f"tool_choice.{name}", "function" if several else "allowed_tools"
            raise invalid(field, f"{field} needs tool_choice.type {owner}; remove it")
    if several and not choice.tools:
        field = "tool_choice.tools"
        raise invalid(field, f"{field} names no tool; name some, or use tool_choice: none")


def _allowed(tools: tuple[Tool, ...], choice: ChoiceObject) -> tuple[Tool, ...]:
    names: set[str] = set()
    for index, allowed in enumerate(choice.tools or ()):
        path = f"tool_choice.tools[{index}]"
        if allowed.type != "function":
            raise _unknown_type(path, allowed.type)
        if allowed.name not in {tool.name for tool in tools}:
            raise invalid(
                f"{path}.name", f"{path}.name is {quoted(allowed.name)}, which is not a tool"
            )
        names.add(allowed.name)
    return tuple(tool for tool in tools if tool.name in names)


def _mode(given: str, path: str) -> ToolMode:
    if given not in _MODES:
        raise invalid(path, f"{path} is {quoted(given)}; it must be one of {', '.join(_MODES)}")
    return _MODES[given]


def _unknown_type(path: str, given: str) -> Exception:
    return invalid(f"{path}.type", f"{path}.type is {quoted(given)}; only function is supported")
