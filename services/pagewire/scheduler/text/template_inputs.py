"""The inputs of a conversation that a model's chat template renders, as pb.Model lists them."""

from itertools import product
from typing import Any

from pagewire.errors import RequestError
from pagewire.scheduler.text.chat_template import ChatTemplate, Message

_USER: Message = {"role": "user", "content": "What is 6 times 7?"}
_ANSWER: Message = {"role": "assistant", "content": "42"}
_CALL: dict[str, Any] = {
    "id": "a1b2c3d4e",  # Mistral's templates require nine characters
    "type": "function",
    "function": {"name": "multiply", "arguments": {"x": 6, "y": 7}},
}
_ASKING: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies.",
        "parameters": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
}
# Turns of a role, with None in their place: what comes before and after them.
_PLACES: dict[str, tuple[tuple[Message | None, ...], ...]] = {
    "system": (
        (None, _USER),
        (None, _USER, _ANSWER, _USER),
        (_USER, None),
        (_USER, _ANSWER, None, _USER),
    ),
    "tool": (
        (_USER, _ASKING, None),
        (_USER, _ASKING, None, _ANSWER, _USER),
        (_USER, _ASKING, None, None, _ANSWER),
        (_USER, None),
    ),
}
_TEXTS = ("One text.", "Another text of a turn.")


def template_inputs(template: ChatTemplate | None) -> tuple[str, ...]:
    """The variables, fields of messages and roles that a template renders; see pb.Model."""
    if template is None or template.reads is None:
        return ()
    roles = {f"messages[role={role}]" for role in _PLACES if _renders_role(template, role)}
    return tuple(sorted(template.reads | roles))


def _renders_role(template: ChatTemplate, role: str) -> bool:
    """Whether the text of a role's turns reaches the prompt.

    A template that names the role may render its turns in some conversations only. Any other
    template treats the role as it treats all others, so a few conversations show what it does.
    """
    quoted = (f"'{role}'", f'"{role}"')
    if any(name in source for source in template.sources.values() for name in quoted):
        return True
    prompts = [
        [_prompt(template, role, places, text, tools) for text in _TEXTS]
        for places, tools in product(_PLACES[role], (None, [_TOOL]))
    ]
    # A prompt is None if the template refuses the conversation: then requests are refused, too.
    return any(one != other for one, other in prompts) or all(one is None for one, _ in prompts)


def _prompt(
    template: ChatTemplate,
    role: str,
    places: tuple[Message | None, ...],
    text: str,
    tools: list[dict[str, Any]] | None,
) -> str | None:
    turn = {"role": role, "content": text, "tool_call_id": _CALL["id"]}
    turns = [turn if each is None else each for each in places]
    try:
        return template.render(turns, True, {}, tools=tools)
    except RequestError:
        return None
