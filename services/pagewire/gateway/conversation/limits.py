"""Bounds on the tools and calls of a conversation."""

from dataclasses import dataclass

from pagewire.config import GatewayConfig
from pagewire.errors import invalid

# A template may indent JSON, so the text of a value grows with its depth.
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The settings of the same names; GatewayConfig explains them."""

    max_tools: int = GatewayConfig.max_tools
    max_tool_bytes: int = GatewayConfig.max_tool_bytes
    max_tool_nodes: int = GatewayConfig.max_tool_nodes

    def check(self, field: str, size: int, nodes: int) -> None:
        """RequestError for too many bytes or JSON values."""
        for count, limit, unit, setting in (
            (size, self.max_tool_bytes, "bytes", "--max-tool-bytes"),
            (nodes, self.max_tool_nodes, "values", "--max-tool-nodes"),
        ):
            if count > limit:
                raise invalid(
                    field,
                    f"{field} has {count} {unit} of JSON; at most {limit} are allowed: shorten "
                    f"it, or raise {setting}",
                )


def count_nodes(value: object, field: str, depth: int = MAX_DEPTH) -> int:
    """The values in a JSON value, including itself; RequestError if it is nested too deeply."""
    if not isinstance(value, dict | list):
        return 1
    if depth == 0:
        raise invalid(field, f"{field} is nested deeper than {MAX_DEPTH} levels; flatten it")
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(count_nodes(item, field, depth - 1) for item in inner)
