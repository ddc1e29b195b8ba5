"""The events that an output parser finds in a model's text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. A call that the output's end cuts off has no CallEnd."""

    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd
