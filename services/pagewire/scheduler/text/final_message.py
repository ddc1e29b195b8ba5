"""Rendering a conversation so that the model continues its last message."""

from collections.abc import Callable
from typing import Any

from pagewire.errors import invalid

FIELD = "continue_final_message"
# Appended to the last message, so that its end is found in the rendered text. A template that trims
# the content of messages removes the space.
_MARK = "[the last message ends here] "


def render_open_ended(
    render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]
) -> str:
    """What `render` makes of the messages, up to the end of the last one's content.

    RequestError if the template does not show the content as it is. White space at its end is kept
    unless the template trims it.
    """
    last = messages[-1]
    content = last.get("content")
    if not isinstance(content, str) or not content.strip():
        raise invalid(FIELD, f"{FIELD} needs text in the last message; add some or leave it out")
    text = render([*messages[:-1], {**last, "content": content + _MARK}])
    end = text.rfind(_MARK.rstrip())
    if end < 0 or content.strip() not in text[:end]:
        raise invalid(
            FIELD,
            f"the chat template changes the text of the last message, so {FIELD} has no meaning; "
            "leave it out",
        )
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()
