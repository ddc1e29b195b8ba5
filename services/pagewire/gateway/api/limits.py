"""Bounds on what a request's body may hold, which are checked before the work that they bound."""

from dataclasses import dataclass

from pagewire.config import GatewayConfig

# A message with its fields and parts. It bounds the memory that parsing a conversation takes.
_NODES_A_MESSAGE = 32
_OTHER_NODES = 1024  # of the fields beside the messages


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """See the settings of the same names."""

    max_json_nodes: int = GatewayConfig.max_json_nodes
    max_messages: int = GatewayConfig.max_messages
    max_template_bytes: int = GatewayConfig.max_template_bytes
    max_template_nodes: int = GatewayConfig.max_template_nodes

    @classmethod
    def of(cls, config: GatewayConfig) -> "BodyLimits":
        """Those that are configured."""
        return cls(
            config.max_json_nodes,
            config.max_messages,
            config.max_template_bytes,
            config.max_template_nodes,
        )

    @property
    def chat_nodes(self) -> int:
        """Most JSON values of a conversation's body."""
        wanted = _NODES_A_MESSAGE * self.max_messages + self.max_template_nodes + _OTHER_NODES
        return min(self.max_json_nodes, wanted)
