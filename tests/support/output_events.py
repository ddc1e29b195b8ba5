"""A model's outputs as parser events, for tests of the answers made from them."""

import json
import re
from typing import Any

from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.errors import ApiError
from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from pagewire.v1 import inference_pb2 as pb

_EVENT = re.compile(r"event: (\S+)\ndata: (.*)\n\n")

STOP = pb.Finish(
    reason=pb.FINISH_REASON_STOP,
    usage=pb.Usage(prompt_tokens=11, completion_tokens=7, cached_tokens=4),
)
LENGTH = pb.Finish(
    reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(prompt_tokens=11, completion_tokens=7),
)

ANSWER: list[Event] = [Content("Hello "), Content('"you" 🙂')]
CALLS: list[Event] = [
    Reasoning("Let me "),
    Reasoning("see."),
    Content("Two calls."),
    CallBegin(0, "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Ulm"}'),
    CallEnd(0),
    CallBegin(1, "time"),
    CallArguments(1, "{}"),
    CallEnd(1),
]
CUT: list[Event] = [CallBegin(0, "weather"), CallArguments(0, '{"city": "U')]


def parsed(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and data of a stream, which must consist of events."""
    assert _EVENT.sub("", stream) == ""
    found = [(name, json.loads(data)) for name, data in _EVENT.findall(stream)]
    assert all(name == data["type"] for name, data in found)
    return found


def streamed(
    form: AnswerForm, events: list[Event], finish: pb.Finish, reasoning: int | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """The stream of an output."""
    answer = form.events(True)
    pieces = answer.begin(11)
    for event in events:
        pieces += answer.feed([event])
    return parsed("".join([*pieces, *answer.finish(finish, reasoning)]))


def whole(
    form: AnswerForm, events: list[Event], finish: pb.Finish, reasoning: int | None = None
) -> dict[str, Any]:
    """The body of an output; nothing is written for a stream."""
    answer = form.events(False)
    assert answer.begin(11) == []
    assert answer.feed(events) == []
    assert answer.finish(finish, reasoning) == []
    found: dict[str, Any] = json.loads("".join(answer.body()))
    return found


def failed(
    form: AnswerForm, events: list[Event], error: ApiError
) -> list[tuple[str, dict[str, Any]]]:
    """The stream of an output that ends with an error."""
    answer = form.events(True)
    pieces = [*answer.begin(11), *answer.feed(events), *answer.fail(error)]
    return parsed("".join(pieces))


_NEW_FIELDS = ("id", "item_id", "call_id", "created_at", "completed_at")


def without_ids(value: Any) -> Any:
    """The value with ids and times replaced: each answer has new ones."""
    if isinstance(value, dict):
        return {
            key: "..." if key in _NEW_FIELDS else without_ids(item) for key, item in value.items()
        }
    return [without_ids(item) for item in value] if isinstance(value, list) else value
