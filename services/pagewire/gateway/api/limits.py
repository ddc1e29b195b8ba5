"""Bounds on the content of a request's body, checked before the work that depends on it."""

from dataclasses import dataclass, field

from pagewire.config import GatewayConfig
from pagewire.gateway.conversation.limits import ToolLimits

# JSON values of a message with its fields and parts. This bounds the memory of parsing.
_NODES_A_MESSAGE = 32
_OTHER_NODES = 1024  # JSON values of the fields beside the messages


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The settings of the same names; GatewayConfig explains them."""

    max_json_nodes: int = GatewayConfig.max_json_nodes
    max_messages: int = GatewayConfig.max_messages
    max_template_bytes: int = GatewayConfig.max_template_bytes
    max_template_nodes: int = GatewayConfig.max_template_nodes
    max_prompt_logprobs: int = GatewayConfig.max_prompt_logprobs
    tools: ToolLimits = field(default_factory=ToolLimits)

    @classmethod
    def of(cls, config: GatewayConfig) -> "BodyLimits":
        """The limits of a configuration."""
        return cls(
            config.max_json_nodes,
            config.max_messages,
            config.max_template_bytes,
            config.max_template_nodes,
            config.max_prompt_logprobs,
            ToolLimits(config.max_tools, config.max_tool_bytes, config.max_tool_nodes),
        )

    @property
    def chat_nodes(self) -> int:
        """The maximum number of JSON values in the body of a chat request."""
        needed = _NODES_A_MESSAGE * self.max_messages + self.max_template_nodes + _OTHER_NODES
        needed += self.tools.max_tool_nodes
        return min(self.max_json_nodes, needed)
