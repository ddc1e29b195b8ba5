"""The tools of a request, and which of them the model may or must call."""

from typing import Annotated

from pydantic import Field, JsonValue

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import Strict
from pagewire.gateway.api.messages.unsupported import TOOL, TOOL_HINTS
from pagewire.gateway.conversation.tools import Tool, ToolChoice, ToolMode, ToolOptions

_MODES: dict[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


class ToolDefinition(Strict):
    """A tool of the client. Tools that Anthropic defines or runs have other types."""

    hints = TOOL_HINTS
    refused = TOOL

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    strict: bool | None = None

    def to_tool(self, path: str) -> Tool:
        """The tool, named `path` in errors."""
        if self.type not in (None, "custom"):
            raise invalid(
                f"{path}.type",
                f"{path}.type is {quoted(self.type)}; only custom is supported: describe the tool "
                "with an input_schema",
            )
        if self.input_schema is None:
            raise invalid(f"{path}.input_schema", f"{path}.input_schema is required")
        strict = bool(self.strict)
        return Tool(self.name, self.description, self.input_schema, strict, path, "input_schema")


class ToolChoiceField(Strict):
    """What the model may or must call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True)]


def tool_options(tools: list[ToolDefinition], choice: ToolChoiceField | None) -> ToolOptions:
    """The tools and the choice among them; RequestError names a field that is not valid."""
    given = tuple(tool.to_tool(f"tools[{i}]") for i, tool in enumerate(tools))
    if choice is None:
        return ToolOptions(given)
    if choice.type not in _MODES:
        known = ", ".join(_MODES)
        raise invalid(
            "tool_choice.type",
            f"tool_choice.type is {quoted(choice.type)}; it must be one of {known}",
        )
    if choice.type == "tool" and choice.name is None:
        raise invalid("tool_choice.name", "tool_choice.name is required with type tool")
    if choice.type != "tool" and choice.name is not None:
        raise invalid("tool_choice.name", "tool_choice.name belongs to tool_choice.type tool")
    wanted = ToolChoice(_MODES[choice.type], choice.name or "")
    return ToolOptions(given, wanted, not choice.disable_parallel_tool_use)
