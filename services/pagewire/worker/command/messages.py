"""Writes the JSON lines between a worker and its program, and reads them with strict checks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.errors import quoted
from pagewire.limits import INT32_MAX

# Of a line that the program writes; a longer line is an error.
MAX_LINE_BYTES = 1 << 20
_MAX_LINE_QUOTED = 80  # characters of a line that a message quotes


class NonsenseError(Exception):
    """The output of the program does not follow the protocol."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first line of a program.

    `honours` are the sampling parameters that the program applies. Without `max_sequences` the
    worker's settings limit the sequences that run at once.
    """

    reads_text: bool = False
    writes_text: bool = False
    honours: frozenset[str] = frozenset()
    max_sequences: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a sequence; `finished` and `error` end it."""

    id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finished: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """A sequence for the program to continue.

    `prompt` and `output` (generated so far) are token ids, or texts if the program reads texts.
    `sampling` has the parameters that differ from their neutral values, and the seed.
    """

    id: str
    prompt: list[int] | str
    output: list[int] | str
    max_tokens: int
    stop_token_ids: list[int]
    sampling: Mapping[str, Any]

    def line(self) -> bytes:
        """The line for the program."""
        texts = isinstance(self.prompt, str)
        return _line(
            {
                "type": "generate",
                "id": self.id,
                "prompt" if texts else "prompt_token_ids": self.prompt,
                "output" if texts else "output_token_ids": self.output,
                "max_tokens": self.max_tokens,
                "stop_token_ids": self.stop_token_ids,
                "sampling": dict(self.sampling),
            }
        )


def cancel_line(sequence_id: str) -> bytes:
    """The line that tells the program that a sequence needs no more output."""
    return _line({"type": "cancel", "id": sequence_id})


def read_ready(line: bytes) -> Ready:
    """The first line of a program; NonsenseError says what is wrong with it."""
    given = _object(line)
    if given.get("type") != "ready":
        raise NonsenseError(f'its first line is {_quoted(line)}; it must have "type": "ready"')
    _refuse_unknown(given, {"type", "input", "output", "honours", "max_sequences"}, line)
    honours = given.get("honours", [])
    if not isinstance(honours, list) or not all(isinstance(name, str) for name in honours):
        raise NonsenseError("honours must be a list of names of sampling parameters")
    most = given.get("max_sequences")
    if most is not None and not _is_count(most, 1):
        raise NonsenseError(f"max_sequences is {most!r}; it must be a whole number above 0")
    return Ready(
        reads_text=_is_text(given, "input"),
        writes_text=_is_text(given, "output"),
        honours=frozenset(honours),
        max_sequences=most,
    )


def read_piece(line: bytes) -> Piece:
    """A later line of a program; NonsenseError if it belongs to no sequence or is malformed."""
    given = _object(line)
    if not isinstance(given.get("id"), str):
        raise NonsenseError(f"{_quoted(line)} has no id")
    _refuse_unknown(given, {"id", "token_ids", "text", "finished", "error"}, line)
    ids, text = given.get("token_ids", []), given.get("text", "")
    finished, error = given.get("finished", False), given.get("error")
    well_formed = (
        isinstance(ids, list)
        and all(_is_count(token, 0) for token in ids)
        and isinstance(text, str)
        and isinstance(finished, bool)
        and (error is None or isinstance(error, str))
    )
    if not well_formed:
        raise NonsenseError(f"{_quoted(line)} has a field of a wrong type")
    return Piece(given["id"], tuple(ids), text, finished, error)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise NonsenseError(f"{_quoted(line)} is not JSON") from None
    if not isinstance(given, dict):
        raise NonsenseError(f"{_quoted(line)} is not a JSON object")
    return given


def _refuse_unknown(given: Mapping[str, Any], known: set[str], line: bytes) -> None:
    for name in given:
        if name not in known:
            raise NonsenseError(f"{_quoted(line)} has the unknown field {quoted(name)}")


def _is_text(given: Mapping[str, Any], name: str) -> bool:
    kind = given.get(name, "tokens")
    if kind not in ("tokens", "text"):
        raise NonsenseError(f'{name} is {kind!r}; it must be "tokens" or "text"')
    return bool(kind == "text")


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= INT32_MAX


def _quoted(line: bytes) -> str:
    return quoted(line.decode(errors="replace").strip(), _MAX_LINE_QUOTED)
