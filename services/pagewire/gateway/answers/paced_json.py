"""Large JSON, formatted and sent in pieces so that the event loop is not blocked."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.gateway.api.formatting import Formatter, json_prompt_logprobs, json_utf8
from pagewire.gateway.generation.logprob_log import TokenLogprobs
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.generation.prompt_log import PromptLog

# A connection buffers this many bytes before it asks the sender to wait.
_PIECE_BYTES = 64 << 10
# Formatting this many tokens takes about a millisecond with 20 candidates each.
TOKENS_A_PIECE = 16

Dumps = Callable[[Any], str]


class TokenSource(Protocol):
    """Tokens of a choice with their log probabilities; each token is taken once."""

    @property
    def waiting(self) -> int:
        """Tokens that were not taken yet."""

    def take(self, at_least: int | None = None) -> list[TokenLogprobs]:
        """Removes and returns at least this many tokens, or all tokens with None."""


class PacedJson(Response):
    """A JSON answer that is passed to the connection in pieces, as fast as the client reads.

    An answer passed in one piece counts as sent. With TLS, the connection would then be closed
    after some time, even while a slow client still reads.
    """

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        size = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(size)}, media_type=self.media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the head, then the pieces of the body."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        pacer = Pacer()
        for large in self._pieces:
            for begin in range(0, len(large), _PIECE_BYTES):
                piece = large[begin : begin + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await pacer.pause_if_due()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def object_pieces(
    fields: dict[str, Any], name: str, value: list[str], dumps: Dumps = json_utf8
) -> list[str]:
    """The JSON of an object, in pieces. `value` has the pieces of the field `name`."""
    return object_of_pieces(fields, {name: value}, dumps)


def object_of_pieces(
    fields: dict[str, Any], large: Mapping[str, list[str]], dumps: Dumps = json_utf8
) -> list[str]:
    """The JSON of an object, in pieces. `large` has the pieces of some of its fields."""
    pieces = ["{"]
    for index, (key, other) in enumerate(fields.items()):
        pieces.append(f"{',' if index else ''}{dumps(key)}:")
        pieces += large.get(key) or [dumps(other)]
    return [*pieces, "}"]


async def paced_logprobs(
    formatter: Formatter, sources: list[TokenSource], pacer: Pacer, dumps: Dumps = json_utf8
) -> list[str]:
    """The JSON of the log probabilities now waiting in `sources`, in pieces."""
    arrays: dict[str, list[str]] = {}
    others: dict[str, Any] = {}
    for source in sources:
        left = source.waiting  # tokens that arrive during a pause are left for the next call
        while left:
            tokens = source.take(min(TOKENS_A_PIECE, left))
            left -= len(tokens)
            for name, value in formatter.logprobs(tokens).items():
                if isinstance(value, list):
                    pieces = arrays.setdefault(name, [])
                    pieces.append(("," if pieces else "") + dumps(value)[1:-1])
                else:
                    others[name] = value
            await pacer.pause_if_due()
    written = ["{"]
    for name, pieces in arrays.items():
        written += [f"{',' if len(written) > 1 else ''}{dumps(name)}:[", *pieces, "]"]
    written += [f",{dumps(name)}:{dumps(value)}" for name, value in others.items()]
    return [*written, "}"]


async def paced_prompt_logprobs(prompt: PromptLog, pacer: Pacer) -> list[str]:
    """The JSON of the field `prompt_logprobs`, in pieces: null for the first token."""
    top = prompt.wishes.top
    assert top is not None
    pieces = ["[null"]
    for begin in range(1, prompt.num_tokens, TOKENS_A_PIECE):
        tokens = prompt.scored(begin, min(begin + TOKENS_A_PIECE, prompt.num_tokens), top)
        pieces.append("," + json_utf8(json_prompt_logprobs(tokens))[1:-1])
        await pacer.pause_if_due()
    return [*pieces, "]"]
