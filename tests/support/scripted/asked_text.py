"""Prompts that make the model of `text_worker` write a text. Imports nothing of the project."""

import base64
import re

_ASKED = re.compile(r"SAY ([A-Za-z0-9+/=]+)")


def ask(text: str) -> str:
    """A message that makes the model answer with a text."""
    return f"SAY {base64.b64encode(text.encode()).decode()}"


def asked_text(prompt: str) -> str:
    """The text that a prompt asks for last; `?` if it asks for none."""
    asked = _ASKED.findall(prompt)
    return base64.b64decode(asked[-1]).decode() if asked else "?"


def call(name: str, arguments: str) -> str:
    """The text of a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
