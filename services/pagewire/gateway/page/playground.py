"""The playground: the page ends a worker of `pagewire run --playground` and shows the effect."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagewire.errors import quoted
from pagewire.gateway.errors import ApiError

KILL_PATH = "/engine/kill"
PLAYGROUND_PATH = "/engine/playground"
_ANSWER_SECONDS = 5.0
_MAX_BODY_BYTES = 1024
_MEANINGS = {"worker": "a worker's address", "model": "a model's name"}


class Playground:
    """Forwards requests to end a worker to the supervisor, if a supervisor allows it."""

    def __init__(
        self, socket: str | None, busiest_worker: Callable[[str | None], Awaitable[str | None]]
    ) -> None:
        """`socket` is the supervisor's. `busiest_worker` returns the address of a worker, of a
        given model or of any."""
        self._socket = socket
        self._busiest_worker = busiest_worker

    async def state(self, request: Request) -> Response:
        """Whether this gateway can end workers."""
        return JSONResponse({"playground": self._socket is not None})

    async def kill(self, request: Request) -> Response:
        """Ends the worker with the address `worker` in the body; without an address, the busiest
        worker, of the body's `model` if it has one."""
        if self._socket is None:
            raise ApiError(
                403,
                "this server has no playground; start it with `pagewire run --playground`",
                code="no_playground",
            )
        # Pages of other origins can send this type only if --cors-origins allows it.
        if request.headers.get("content-type") != "application/json":
            raise ApiError(415, "the content-type must be application/json")
        given = _texts_in(await _small_body(request))
        address = given.get("worker") or await self._busiest_worker(given.get("model"))
        if address is None:
            raise ApiError(409, "no worker is connected; try again when one is", code="no_worker")
        killed = await self._ask(address)
        if killed is None:
            raise ApiError(409, f"no worker runs at {address}; see the engine", code="no_worker")
        return JSONResponse({"killed": killed})

    async def _ask(self, address: str) -> str | None:
        """The name of the worker that the supervisor has ended; None without one at the address."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(json.dumps({"kill": address}).encode() + b"\n")
                    answer = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            raise ApiError(503, "the supervisor does not answer; try again") from error
        name = answer.get("killed")
        return None if name is None else str(name)


async def _small_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
    return body


def _texts_in(body: bytes) -> dict[str, str]:
    """The `worker` and the `model` of a body, each if present."""
    try:
        given: Any = json.loads(body or b"{}")
    except ValueError:
        given = None
    if not isinstance(given, Mapping) or given.keys() - _MEANINGS.keys():
        raise ApiError(400, "the body must be a JSON object with `worker` or `model`, or nothing")
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            message = f"{name} is {quoted(value)}; it must be {_MEANINGS[name]}"
            raise ApiError(400, message, param=name)
    return found
