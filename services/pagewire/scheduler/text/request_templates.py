"""Chat templates in requests.

A template is a program: it may take seconds, or memory without end. So they are rendered in helper
processes only, and where the operator trusts the clients.
"""

from functools import lru_cache

from pagewire.errors import invalid
from pagewire.limits import MAX_CHAT_TEMPLATE_BYTES
from pagewire.scheduler.text.chat_template import ChatTemplate

FIELD = "chat_template"
_CACHED = 16


class RequestTemplates:
    """Parses the templates of requests; the latest ones are kept."""

    def __init__(self, trusted: bool, special_tokens: dict[str, str]) -> None:
        self._trusted = trusted
        self._special_tokens = special_tokens
        self._parsed = lru_cache(_CACHED)(self._parse)

    def parse(self, source: str) -> ChatTemplate:
        """The template; RequestError if it does not parse, is too large, or none is allowed."""
        if not self._trusted:
            raise invalid(
                FIELD,
                f"{FIELD} is not allowed here; leave it out, or start the scheduler with "
                "--trust-request-chat-template",
            )
        size = len(source.encode())
        if size > MAX_CHAT_TEMPLATE_BYTES:
            raise invalid(
                FIELD,
                f"{FIELD} has {size} bytes; shorten it to {MAX_CHAT_TEMPLATE_BYTES} at most",
            )
        return self._parsed(source)

    def _parse(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens)
        except ValueError as error:
            raise invalid(FIELD, f"{FIELD}: {error}") from error
