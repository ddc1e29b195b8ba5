"""Large JSON: made in turns of the event loop, and sent piece by piece."""

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.gateway.api.formatting import Reply
from pagewire.gateway.generation.logprob_log import LogprobLog
from pagewire.gateway.generation.turns import Turns

# As much as a connection holds before it asks to wait.
_PIECE_BYTES = 64 << 10
# With 20 candidates each they take about a millisecond.
TOKENS_A_PIECE = 16

Dumps = Callable[[Any], str]


def readable(value: Any) -> str:
    """JSON without spaces, in which text stays as it is."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class PacedJson(Response):
    """JSON that is handed to the connection piece by piece, as the client takes it.

    What a connection has been given as a whole counts as sent, and behind TLS it would be closed
    after some time, whether or not a slow client has read it.
    """

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        size = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(size)}, media_type=self.media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends head and body."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        turns = Turns()
        for whole in self._pieces:
            for begin in range(0, len(whole), _PIECE_BYTES):
                piece = whole[begin : begin + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await turns.give()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def spliced(
    fields: dict[str, Any], name: str, value: list[str], dumps: Dumps = readable
) -> list[str]:
    """JSON of an object, in pieces; `value` is that of the field `name`, in pieces already."""
    pieces = ["{"]
    for index, (key, other) in enumerate(fields.items()):
        pieces.append(f"{',' if index else ''}{dumps(key)}:")
        pieces += value if key == name else [dumps(other)]
    return [*pieces, "}"]


async def paced_logprobs(
    reply: Reply, log: LogprobLog, turns: Turns, dumps: Dumps = readable
) -> list[str]:
    """JSON of what `reply` says of the tokens that wait in `log` now, in pieces."""
    arrays: dict[str, list[str]] = {}
    others: dict[str, Any] = {}
    left = log.waiting  # more may come meanwhile, in blocks of their own
    while left:
        tokens = log.take(min(TOKENS_A_PIECE, left))
        left -= len(tokens)
        for name, value in reply.logprobs(tokens).items():
            if isinstance(value, list):
                pieces = arrays.setdefault(name, [])
                pieces.append(("," if pieces else "") + dumps(value)[1:-1])
            else:
                others[name] = value
        await turns.give()
    written = ["{"]
    for name, pieces in arrays.items():
        written += [f"{',' if len(written) > 1 else ''}{dumps(name)}:[", *pieces, "]"]
    written += [f",{dumps(name)}:{dumps(value)}" for name, value in others.items()]
    return [*written, "}"]
