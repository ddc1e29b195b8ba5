"""Parses bodies: small ones on the event loop, others in helper processes."""

from dataclasses import replace

from starlette.types import Receive

from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError
from pagewire.gateway.answers.disconnect import while_connected
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.tokenization import TextCall
from pagewire.gateway.models import Models
from pagewire.gateway.parsing.job_parser import (
    HelperSetup,
    JobParser,
    Route,
    TextRoute,
    node_bound,
    pack_task,
    unpack_call,
    unpack_job,
)
from pagewire.helpers.pool import Bytes, HelperError, HelperPool

# The event loop parses bodies within both bounds. That takes a few milliseconds at worst.
INLINE_BYTES = 16 << 10
INLINE_NODES = 512
# Larger bodies do not get the last free helper process.
LARGE_BYTES = 1 << 20


class ParserPool:
    """Parses bodies without blocking the event loop."""

    def __init__(
        self,
        limits: BodyLimits,
        max_body_bytes: int,
        processes: int = GatewayConfig.parser_processes,
        timeout: float = GatewayConfig.parse_timeout,
        strict_fields: bool = False,
    ) -> None:
        self._inline = JobParser(limits, strict_fields)
        self._helpers = HelperPool(
            "the gateway's parser",
            "pagewire.gateway.parsing.job_parser:load_helper",
            HelperSetup(limits, max_body_bytes, strict_fields),
            size=processes,
            timeout=timeout,
        )

    async def start(self) -> None:
        """Starts the first helper process, without waiting for it."""
        await self._helpers.start()

    async def close(self) -> None:
        """Ends the helper processes."""
        await self._helpers.close()

    async def parse(self, route: Route, body: Bytes, models: Models, receive: Receive) -> Job:
        """The job of a body; RequestError names a field that is not valid.

        ClientGoneError as soon as the client closes its connection.
        """
        if _is_small(body):
            return self._inline.parse(route, bytes(body), models)
        return unpack_job(await self._run(pack_task("job", route, dict(models)), body, receive))

    async def text_call(
        self, route: TextRoute, body: Bytes, models: Models, receive: Receive
    ) -> TextCall:
        """The call that a body asks for, with the errors of `parse`."""
        if _is_small(body):
            return self._inline.text_call(route, bytes(body), models)
        return unpack_call(
            await self._run(pack_task("text_call", route, dict(models)), body, receive)
        )

    async def text_body(
        self, call: TextCall, response: bytes, max_model_len: int, receive: Receive
    ) -> bytes:
        """The JSON of the response to a call; ClientGoneError as in `parse`."""
        if len(response) <= INLINE_BYTES:
            return call.body(response, max_model_len)
        # The helper needs no prompt to write an answer.
        task = pack_task("text_body", replace(call, request=b""), max_model_len)
        return bytes(await self._run(task, response, receive))

    async def _run(self, task: bytes, data: Bytes, receive: Receive) -> Bytes:
        try:
            return await while_connected(
                self._helpers.run(task, data, large=len(data) > LARGE_BYTES), receive
            )
        except HelperError as error:
            raise RequestError(
                Code.INTERNAL, f"the request could not be parsed: {error}; make it smaller"
            ) from error


def _is_small(body: Bytes) -> bool:
    return len(body) <= INLINE_BYTES and node_bound(body) <= INLINE_NODES
