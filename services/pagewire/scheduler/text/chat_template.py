"""Chat templates: a model's Jinja template turns a conversation into its prompt text.

transformers renders them, in Jinja's immutable sandbox, as templates come with model files. Its
module for that imports no torch. `template_files` finds the templates of a model.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError

from pagewire.errors import invalid
from pagewire.scheduler.text.template_reads import template_reads

# No advice to install torch when transformers is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]

DEFAULT = "default"
TOOL_USE = "tool_use"
# Names that `render` sets itself: a request cannot give them as variables.
RESERVED = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "conversations",
        "chat_template",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
# The optional fields of messages, as pb.Model names them, and the keys that templates read them by.
FIELDS = {
    "messages[].name": ("name",),
    "messages[].tool_calls": ("tool_calls",),
    "messages[].reasoning_content": ("reasoning_content", "thinking"),
}


class ChatTemplate:
    """The templates of one model; `render` may be called from any thread."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`source` is a template, or several by name: "default", "tool_use" for requests with
        tools, and others. `special_tokens` are variables such as `bos_token`.

        ValueError if a template does not parse, or if none of several is the default one.
        """
        self.sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)
        if DEFAULT not in self.sources:
            raise ValueError(
                f"the model has the chat templates {', '.join(sorted(self.sources))}, and none of "
                "them is the default; give one with --chat-template"
            )
        for name, text in self.sources.items():
            _check_syntax(name, text)

    @cached_property
    def reads(self) -> frozenset[str] | None:
        """The inputs that the templates read: variables by name, and `FIELDS` of messages.

        None if a template has a tag that only transformers knows.
        """
        used = [self.sources[name] for name in (DEFAULT, TOOL_USE) if name in self.sources]
        found = set() if len(used) == 1 else {"tools"}  # tools choose the template
        for source in used:
            try:
                variables, fields = template_reads(source)
            except TemplateSyntaxError:
                return None
            found |= variables
            found |= {
                name
                for name, keys in FIELDS.items()
                if fields is None or not fields.isdisjoint(keys)
            }
        return frozenset(found)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text; RequestError with the template's own message if it raises an error.

        `variables` have none of the names in RESERVED, and may give `tools` and `documents`, too.
        With `continue_final_message` the text ends with the content of the last message.
        """
        given = {**self._special_tokens, "tools": tools, "documents": documents, **variables}
        named = TOOL_USE if given["tools"] and TOOL_USE in self.sources else DEFAULT
        try:
            [text], _ = render_jinja_template(
                [messages],
                chat_template=self.sources[named],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **given,
            )
        except Exception as error:  # the template computes with the client's values only
            raise invalid(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from error
        return str(text)


def _check_syntax(name: str, text: str) -> None:
    try:
        render_jinja_template([[]], chat_template=text)
    except TemplateSyntaxError as error:
        which = "" if name == DEFAULT else f" {name!r}"
        raise ValueError(
            f"the model's chat template{which} does not parse: line {error.lineno}: {error}"
        ) from error
    except Exception:
        pass  # it parses, and refuses an empty conversation
