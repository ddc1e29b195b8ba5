"""What an output parser finds in a model's text."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """A piece of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """A piece of the answer's text."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON of a call's arguments."""

    index: int
    json: str


class CallEnd(NamedTuple):
    """A call is complete. A call that the output's end cuts off has no such event."""

    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd
