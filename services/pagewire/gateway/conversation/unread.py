"""The inputs of a conversation that the model's chat template leaves out of the prompt."""

from collections.abc import Callable, Collection
from operator import attrgetter

from pagewire.gateway.conversation.conversation import THINKING, Conversation
from pagewire.gateway.conversation.turns import Turn
from pagewire.gateway.models import ServedModel
from pagewire.v1 import inference_pb2 as pb

# Inputs in turns, by their names in pb.Model.
_IN_TURNS: dict[str, Callable[[Turn], object]] = {
    "messages[role=system]": lambda turn: turn.role == "system",
    "messages[role=tool]": lambda turn: turn.role == "tool",
    "messages[].name": attrgetter("name"),
    "messages[].tool_calls": attrgetter("tool_calls"),
    "messages[].reasoning_content": attrgetter("reasoning"),
}


def unread_inputs(
    conversation: Conversation,
    model: ServedModel,
    constraint: pb.StructuredOutput | None = None,
    variables: Collection[str] = (),
) -> tuple[str, ...]:
    """The inputs that have no effect, by their names in the client's API.

    `constraint` is the conversation's: tools that it enforces have an effect. `variables` are the
    client's `chat_template_kwargs`. Nothing is known of a request's own template.
    """
    reads = model.template_inputs
    if not reads or conversation.template is not None:
        return ()
    enforced = constraint is not None and constraint.WhichOneof("kind") is not None
    unread = []
    if conversation.tools.offered and not enforced and "tools" not in reads:
        unread.append("tools")
    unread += [
        name
        for name, given in _IN_TURNS.items()
        if name not in reads and any(map(given, conversation.turns))
    ]
    effort = conversation.reasoning.variables
    if effort and not any(name in reads for name in effort):
        unread.append("reasoning_effort")
    # A model with a reasoning parser may reason although its template has no variable for it.
    can_reason = bool(model.reasoning_parser) or any(name in reads for name in THINKING)
    # Only some APIs have a field for this. Others give the variable, which is named below.
    if "enable_thinking" in conversation.names and conversation.thinking() and not can_reason:
        unread.append("enable_thinking")
    names = [conversation.names.get(name, name) for name in unread]
    kwargs = [f"chat_template_kwargs.{name}" for name in variables if name not in reads]
    return (*names, *kwargs)
