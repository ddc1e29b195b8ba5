"""Collects the events that parsers find."""

from collections.abc import Callable

from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
)
from pagewire.gateway.parsers.reader import SPACE


class Sink:
    """Collects events, and joins neighbouring pieces of the same kind.

    White space in content is held back until it is clear that no tag follows: white space next to
    a tag belongs to the format. Calls beyond `max_calls` are left out.
    """

    __slots__ = ("_events", "_held", "_make", "_max_calls", "_pieces", "calls", "in_call")

    def __init__(self, max_calls: int | None = None) -> None:
        self._events: list[Event] = []
        self._make: Callable[[str], Event] | None = None  # the kind of the pieces
        self._pieces: list[str] = []
        self._held: list[str] = []
        self._max_calls = max_calls
        self.calls = 0  # that have begun, including calls beyond the limit
        self.in_call = False

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._close_piece()
        events, self._events = self._events, []
        return events

    def text(self, text: str, kind: Callable[[str], Event] = Content) -> None:
        """Adds text; white space at its end is held back."""
        stripped = text.rstrip(SPACE)
        if stripped:
            self.release(kind)
            self._put(kind, stripped)
        if len(stripped) < len(text):
            self._held.append(text[len(stripped) :])

    def release(self, kind: Callable[[str], Event] = Content) -> None:
        """Adds the held back white space as text."""
        if self._held:
            self._put(kind, "".join(self._held))
            self._held.clear()

    def drop_space(self) -> None:
        """Drops the held back white space, because it belongs to a tag."""
        self._held.clear()

    def begin(self, name: str) -> None:
        """A call begins."""
        self.drop_space()
        self.in_call = True
        self.calls += 1
        if self._counts:
            self._close_piece()
            self._events.append(CallBegin(self.calls - 1, name))

    def arguments(self, json: str) -> None:
        """A piece of the arguments of the call that is open."""
        if json and self._counts:
            self._put(self._arguments, json)

    def end(self) -> None:
        """The open call is complete."""
        self.in_call = False
        if self._counts:
            self._close_piece()
            self._events.append(CallEnd(self.calls - 1))

    @property
    def _counts(self) -> bool:
        return self._max_calls is None or self.calls <= self._max_calls

    def _arguments(self, json: str) -> Event:
        return CallArguments(self.calls - 1, json)

    def _put(self, make: Callable[[str], Event], text: str) -> None:
        if make != self._make:
            self._close_piece()
            self._make = make
        self._pieces.append(text)

    def _close_piece(self) -> None:
        if self._pieces and self._make is not None:
            self._events.append(self._make("".join(self._pieces)))
        self._pieces.clear()
        self._make = None
