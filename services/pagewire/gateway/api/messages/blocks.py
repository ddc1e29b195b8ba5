"""The messages of a request, whose blocks become the turns of a conversation."""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from pagewire.errors import RequestError, invalid, quoted
from pagewire.gateway.api.fields import Strict, string_or_array
from pagewire.gateway.api.messages.unsupported import BLOCK_HINTS
from pagewire.gateway.conversation.turns import ToolCall, Turn

# Prefix of a tool result that is an error; chat templates have no mark for errors.
ERROR_MARK = "Error: "


class TextBlock(Strict):
    """Text."""

    hints = BLOCK_HINTS

    type: Literal["text"]
    text: str


class ToolUseBlock(Strict):
    """A call that an earlier answer made."""

    hints = BLOCK_HINTS

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class ThinkingBlock(Strict):
    """The thinking of an earlier answer. Its signature is not checked: nothing depends on it."""

    hints = BLOCK_HINTS

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class OtherBlock(Strict):
    """A block of a type that is not supported."""

    type: str

    def refusal(self, path: str, supported: str) -> RequestError:
        """The error that names the type."""
        return invalid(
            f"{path}.type", f"{path}.type is {quoted(self.type)}; supported here: {supported}"
        )


def _block_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return f"<{kind}>" if kind in ("text", "tool_use", "tool_result", "thinking") else "<other>"


_BLOCK_ERROR: Any = {
    "custom_error_type": "block",
    "custom_error_message": "it must be a content block",
}
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(lambda value: "<text>" if _block_kind(value) == "<text>" else "<other>"),
]


_CONTENT = string_or_array("content", "<blocks>", "content blocks")
ResultContent = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("<blocks>")],
    _CONTENT,
]


class ToolResultBlock(Strict):
    """What a tool returned."""

    hints = BLOCK_HINTS

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None

    def to_turn(self, path: str) -> Turn:
        """The turn of the tool."""
        text = "" if self.content is None else text_of(self.content, f"{path}.content")
        mark = ERROR_MARK if self.is_error else ""
        return Turn("tool", mark + text, tool_call_id=self.tool_use_id)


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_block_kind, **_BLOCK_ERROR),
]
Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Block], Field(fail_fast=True), Tag("<blocks>")],
    _CONTENT,
]


class Message(Strict):
    """One message."""

    role: str
    content: Content

    def to_turns(self, path: str) -> list[Turn]:
        """The turns of the message; RequestError names what is not valid."""
        if self.role not in ("user", "assistant"):
            raise invalid(
                f"{path}.role",
                f"{path}.role is {quoted(self.role)}; it must be user or assistant, and the system "
                "prompt is the field system",
            )
        if isinstance(self.content, str):
            return [Turn(self.role, self.content)]
        place = f"{path}.content"
        if self.role == "user":
            return _user_turns(self.content, place)
        return [_assistant_turn(self.content, place)]


def turns_of(system: str | None, messages: list[Message]) -> list[Turn]:
    """The turns of a conversation; consecutive texts of the user are one turn."""
    turns = [] if system is None else [Turn("system", system)]
    for index, message in enumerate(messages):
        for turn in message.to_turns(f"messages[{index}]"):
            before = turns[-1] if turns else None
            if turn.role == "user" and before is not None and before.role == "user":
                turns[-1] = Turn("user", f"{before.content}\n{turn.content}")
            else:
                turns.append(turn)
    return turns


def text_of(content: str | list[Any], path: str) -> str:
    """The text of blocks that must be text."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{path}[{i}]") for i, block in enumerate(content))


def _text(block: Any, path: str, supported: str = "text") -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, OtherBlock):
        raise block.refusal(path, supported)
    raise _misplaced(block, path)


def _user_turns(blocks: list[Any], path: str) -> list[Turn]:
    turns: list[Turn] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{path}[{index}]"
        if not isinstance(block, ToolResultBlock):
            texts.append(_text(block, place, "text and tool_result"))
            continue
        if texts:
            turns.append(Turn("user", "\n".join(texts)))
            texts = []
        turns.append(block.to_turn(place))
    if texts or not blocks:
        turns.append(Turn("user", "\n".join(texts)))
    return turns


def _assistant_turn(blocks: list[Any], path: str) -> Turn:
    thinking: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{path}[{index}]"
        if isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(ToolCall(block.id, block.name, arguments, f"{place}.input"))
        else:
            texts.append(_text(block, place, "text, thinking and tool_use"))
    content = "\n".join(texts) if texts or not calls else None
    return Turn(
        "assistant", content, None, tuple(calls), None, "\n".join(thinking) if thinking else None
    )


def _misplaced(block: Any, path: str) -> RequestError:
    return invalid(f"{path}.type", f"{path}.type is {quoted(block.type)}, which cannot stand here")
