"""Text that arrives in pieces, read by generators that yield when they need more text.

A decision depends on the text alone, never on where it was split. A generator that cannot decide
yet yields, and continues after the next call of `feed` or `end`.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
# A computation that yields whenever it needs more text.
Reading = Generator[None, None, Result]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]+")


class Reader:
    """The text that was not read yet, and on demand the text read since `keep`.

    Text that was read leaves the buffer, and the rest is shorter than a tag. So the cost of a text
    is linear in its length, for any split into pieces.
    """

    __slots__ = ("_at", "_ended", "_kept", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def ended(self) -> bool:
        """Whether the text has ended."""
        return self._ended

    def end(self) -> None:
        """Marks the end of the text."""
        self._ended = True

    def keep(self) -> None:
        """Starts to keep the text that is read."""
        self._kept = []

    def forget(self) -> None:
        """Drops the kept text, and stops keeping."""
        self._kept = None

    def kept(self) -> str:
        """Returns the text read since `keep`, and stops keeping."""
        kept = "".join(self._kept or ())
        self._kept = None
        return kept

    def more(self) -> Reading[bool]:
        """Waits for a character; False at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end of the text."""
        return self._text[self._at] if (yield from self.more()) else ""

    def view(self) -> tuple[str, int]:
        """The buffer, and the position in it of the next character."""
        return self._text, self._at

    def take(self, size: int) -> str:
        """Reads characters that are in the buffer."""
        piece = self._text[self._at : self._at + size]
        self._at += size
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads the match in the buffer now; more text may extend it."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found is not None else ""

    def whole_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads all characters of a run; `pattern` matches one or more of them."""
        pieces = []
        while (yield from self.more()):
            piece = self.run(pattern)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def spaces(self) -> Reading[str]:
        """Reads white space."""
        return self.whole_run(_SPACES)

    def match(self, tags: Iterable[str]) -> Reading[str | None]:
        """Reads the longest tag that follows; None if no tag follows."""
        while True:
            text, at = self._text, self._at
            best = max((tag for tag in tags if text.startswith(tag, at)), key=len, default="")
            if self._ended or not self._may_grow(tags, len(best)):
                return self.take(len(best)) or None
            yield

    def closing(self, tags: Iterable[str]) -> Reading[str | None]:
        """Reads a tag as `match` does. A beginning of a tag at the text's end is dropped."""
        found = yield from self.match(tags)
        left = self._text[self._at :]
        if found is None and left and any(tag.startswith(left) for tag in tags):
            self.take(len(left))
        return found

    def _may_grow(self, tags: Iterable[str], found: int) -> bool:
        """Whether a tag longer than `found` might match after more text."""
        left = len(self._text) - self._at
        return any(
            len(tag) > left and len(tag) > found and tag.startswith(self._text[self._at :])
            for tag in tags
        )
