"""The items of a response's output, and the events of each while it grows.

An event here has a type and the JSON of some fields, without braces. `ResponseEvents` adds the
other fields.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewire.gateway.api.formatting import json_ascii, json_logprob
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs

ItemEvent = tuple[str, str]


class OutputItem(Protocol):
    """An item that grows."""

    def added(self) -> list[ItemEvent]:
        """Its beginning."""
        ...

    def add(self, piece: str) -> ItemEvent:
        """Adds text."""
        ...

    def done(self, status: str) -> list[ItemEvent]:
        """Its end."""
        ...

    def whole(self, status: str) -> str:
        """Its JSON."""
        ...


@dataclass(slots=True)
class _TextItem:
    """An item with one part, which has text."""

    id: str
    pieces: list[str] = field(default_factory=list)
    _text: str | None = None  # as JSON, once it is complete

    name = ""  # of the events of its text

    def added(self) -> list[ItemEvent]:
        return [
            ("response.output_item.added", f'"item":{self._item("in_progress", "")}'),
            ("response.content_part.added", f'{self._place()},"part":{self._part(json_ascii(""))}'),
        ]

    def add(self, piece: str) -> ItemEvent:
        self.pieces.append(piece)
        fields = f'{self._place()},"delta":{json_ascii(piece)}{self._extra(last=False)}'
        return f"response.{self.name}.delta", fields

    def done(self, status: str) -> list[ItemEvent]:
        text = self._whole_text()
        return [
            (
                f"response.{self.name}.done",
                f'{self._place()},"text":{text}{self._extra(last=True)}',
            ),
            ("response.content_part.done", f'{self._place()},"part":{self._part(text)}'),
            ("response.output_item.done", f'"item":{self.whole(status)}'),
        ]

    def whole(self, status: str) -> str:
        return self._item(status, self._part(self._whole_text()))

    def _whole_text(self) -> str:
        if self._text is None:
            self._text = json_ascii("".join(self.pieces))
        return self._text

    def _place(self) -> str:
        return f'"item_id":"{self.id}","content_index":0'

    def _extra(self, last: bool) -> str:
        """Further fields of a text event; `last` if it is the last one."""
        return ""

    def _item(self, status: str, parts: str) -> str:
        raise NotImplementedError

    def _part(self, text: str) -> str:
        raise NotImplementedError


@dataclass(slots=True)
class MessageItem(_TextItem):
    """A message of the assistant."""

    logprobs: list[str] = field(default_factory=list)  # JSON of the tokens so far
    _num_sent: int = 0  # the number of `logprobs` sent in deltas

    name = "output_text"

    def add_logprobs(self, tokens: list[TokenLogprobs]) -> None:
        """Adds the log probabilities of tokens whose text follows."""
        self.logprobs += map(_token_json, tokens)

    def _extra(self, last: bool) -> str:
        new = self.logprobs if last else self.logprobs[self._num_sent :]
        self._num_sent = len(self.logprobs)
        return f',"logprobs":[{",".join(new)}]'

    def _item(self, status: str, parts: str) -> str:
        return (
            f'{{"id":"{self.id}","type":"message","role":"assistant","status":"{status}",'
            f'"content":[{parts}]}}'
        )

    def _part(self, text: str) -> str:
        logprobs = ",".join(self.logprobs)
        return f'{{"type":"output_text","text":{text},"annotations":[],"logprobs":[{logprobs}]}}'


@dataclass(slots=True)
class ReasoningItem(_TextItem):
    """The reasoning before a message or a call."""

    name = "reasoning_text"

    def _item(self, status: str, parts: str) -> str:
        return (
            f'{{"id":"{self.id}","type":"reasoning","status":"{status}","summary":[],'
            f'"content":[{parts}],"encrypted_content":null}}'
        )

    def _part(self, text: str) -> str:
        return f'{{"type":"reasoning_text","text":{text}}}'


@dataclass(slots=True)
class CallItem:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def added(self) -> list[ItemEvent]:
        """Its beginning, without arguments."""
        item = self._item("in_progress", json_ascii(""))
        return [("response.output_item.added", f'"item":{item}')]

    def add(self, piece: str) -> ItemEvent:
        """Adds JSON of the arguments."""
        self.pieces.append(piece)
        fields = f'"item_id":"{self.id}","delta":{json_ascii(piece)}'
        return "response.function_call_arguments.delta", fields

    def done(self, status: str) -> list[ItemEvent]:
        """Its end; the arguments of a call that is cut off are not complete."""
        arguments, name = json_ascii("".join(self.pieces)), json_ascii(self.name)
        fields = f'"item_id":"{self.id}","name":{name},"arguments":{arguments}'
        return [
            ("response.function_call_arguments.done", fields),
            ("response.output_item.done", f'"item":{self._item(status, arguments)}'),
        ]

    def whole(self, status: str) -> str:
        """Its JSON."""
        return self._item(status, json_ascii("".join(self.pieces)))

    def _item(self, status: str, arguments: str) -> str:
        return (
            f'{{"id":"{self.id}","type":"function_call","status":"{status}",'
            f'"call_id":"{self.call_id}","name":{json_ascii(self.name)},"arguments":{arguments}}}'
        )


def _token_json(token: TokenLogprobs) -> str:
    return json_ascii({**_candidate(token.token), "top_logprobs": list(map(_candidate, token.top))})


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": candidate.text,
        "bytes": list(candidate.data),
        "logprob": json_logprob(candidate.logprob),
    }
