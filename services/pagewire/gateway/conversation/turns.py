"""The turns of a conversation."""

import json
from dataclasses import dataclass
from typing import Any

from pagewire.errors import invalid
from pagewire.gateway.conversation.limits import count_nodes
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is JSON text, which errors call `field`."""

    id: str
    name: str
    arguments: str
    field: str = "tool_calls.arguments"

    def to_json(self) -> dict[str, Any]:
        """The call as chat templates get it from transformers: its arguments are an object."""
        function = {"name": self.name, "arguments": self._object()}
        return {"id": self.id, "type": "function", "function": function}

    def _object(self) -> dict[str, Any]:
        field = self.field
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise invalid(field, f"{field} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise invalid(field, f"{field} is not a JSON object; give the arguments by name")
        count_nodes(value, field)
        return value


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `content` None stands for null: an assistant that only calls tools has no text."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    def to_proto(self) -> pb.ChatMessage:
        """The turn as the chat template gets it; RequestError for arguments that are not JSON."""
        calls = [call.to_json() for call in self.tool_calls]
        return pb.ChatMessage(
            role=self.role,
            content=self.content or "",
            null_content=self.content is None,
            name=self.name,
            tool_calls=json.dumps(calls, ensure_ascii=False, separators=(",", ":"))
            if calls
            else "",
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning,
        )
